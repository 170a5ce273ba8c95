"""Errors and names of single rows: whatever is wrong with a row costs that row, never the job."""

from __future__ import annotations

import contextlib
import hashlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

from data_prep.readers.chunks import Chunk
from specforge_dspine.utils.chat_template import Message
from specforge_dspine.utils.errors import InvalidRow, RunError

Result = TypeVar("Result")
Results = tuple[str, list[tuple[int | None, Result | InvalidRow]]]
"""A source; lines of it, each with a result or the reason to drop the row."""
NOT_THE_ROWS = (OSError, MemoryError, RunError)  # disk, memory, servers: the next row would fail as well
SHOWN_ERROR = 200  # characters of an unforeseen error's message


@contextlib.contextmanager
def errors_as_invalid_row() -> Iterator[None]:
    """Around what depends on one row's content: an unforeseen exception becomes an InvalidRow with its place."""
    try:
        yield
    except (InvalidRow, *NOT_THE_ROWS):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{str(error)[:SHOWN_ERROR]!r} in {Path(place.filename).name}, line {place.lineno}; please report it"
        raise InvalidRow(f"unexpected {type(error).__name__}", detail) from error


def map_rows(chunk: Chunk, function: Callable[[int | None, Any], Iterable[Result | InvalidRow]]) -> Results[Result]:
    """A chunk's source, and what ``function`` makes of each entry, with its line; or why nothing."""
    results: list[tuple[int | None, Result | InvalidRow]] = []
    for line, entry in chunk.rows():
        try:
            with errors_as_invalid_row():
                for result in function(line, entry):
                    results.append((line, result))
        except InvalidRow as error:
            results.append((line, error))
    return chunk.source, results


def content_key(messages: Iterable[Message]) -> int:
    """A key of who says what; two conversations share one only if they are the same."""
    return hash_64("".join(f"{part['role']} {len(part['content'])} {part['content']}" for part in messages))


def row_name(source: str, entry: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """The id of a row: its own, otherwise where it is from and its content."""
    name = entry.get("id")
    return name if isinstance(name, str) and name else row_id(source, content_key(messages))


@lru_cache(maxsize=64)
def _label(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", PurePath(source).name).strip("-")[:60]


def row_id(source: str, key: int) -> str:
    """An id for a row that has none of its own."""
    return f"{_label(source)}-{key:016x}"


def hash_64(text: str) -> int:
    """A 64-bit key. Two of a hundred million different texts share one with a probability of 3 in 10 000."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
