"""One row that nobody thought of costs that row; what is not the row's ends the job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from data_prep.pipeline.rows import content_key, errors_as_invalid_row, map_rows, row_name
from data_prep.readers.chunks import Entries
from specforge_dspine.utils.errors import InvalidRow


def test_an_unforeseen_exception_becomes_a_named_row() -> None:
    def work(line: int | None, entry: Any) -> Iterator[float]:
        yield 0.0
        yield 1 / entry

    source, results = map_rows(Entries("file", [(1, 1), (2, 0), (3, "a"), (4, 2)]), work)
    reasons = [(line, each.reason) if isinstance(each, InvalidRow) else each for line, each in results]
    expected = [0.0, 1.0, 0.0, (2, "unexpected ZeroDivisionError"), 0.0, (3, "unexpected TypeError"), 0.0, 0.5]
    assert (source, reasons) == ("file", expected)
    (first, _) = (each for _, each in results if isinstance(each, InvalidRow))
    assert "division by zero" in first.detail and "test_rows.py, line " in first.detail


@pytest.mark.parametrize("error", [OSError, ConnectionError, MemoryError, KeyboardInterrupt, SystemExit])
def test_what_is_not_the_rows_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), errors_as_invalid_row():
        raise error


def test_invalid_entries_keep_their_reason() -> None:
    with pytest.raises(InvalidRow) as caught, errors_as_invalid_row():
        raise InvalidRow("known", "why")
    assert (caught.value.reason, caught.value.detail) == ("known", "why")


def test_ids_tell_who_says_what() -> None:
    def chat(*turns: str) -> list[dict[str, str]]:
        return [dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in turns]

    pairs = [
        (chat("system:a", "user:b"), chat("user:a", "user:b")),
        (chat("user:a", "user:b"), chat("user:a\0b")),
        (chat("user:ab", "user:c"), chat("user:a", "user:bc")),
    ]
    assert all(content_key(one) != content_key(other) for one, other in pairs)
    assert content_key(chat("user:a")) == content_key(chat("user:a"))
    assert row_name("s", {"id": "own"}, chat("user:a")) == "own"
    for entry in ({}, {"id": ""}, {"id": 7}):
        assert row_name("dir/s.jsonl", entry, chat("user:a")).startswith("s-jsonl-")
