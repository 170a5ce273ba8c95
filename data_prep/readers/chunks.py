"""Chunks of a file's entries, which a worker parses.

What cannot be read is an ``InvalidRow`` in place of an entry. It keeps its line and is counted.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from specforge_dspine.utils.errors import InvalidRow

Row = tuple[int | None, Any]
"""The line on which an entry begins, or a table's row, from 1, or None for a whole file; and the entry."""


@dataclass(frozen=True)
class Chunk(ABC):
    """Some entries of ``source``, to be sent to a worker."""

    source: str

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """The entries, parsed."""


@dataclass(frozen=True)
class Lines(Chunk):
    """Whole lines from number ``line`` on; an entry each, except blank ones."""

    line: int
    data: bytes

    def rows(self) -> Iterator[Row]:
        for number, text in enumerate(self.data.split(b"\n"), self.line):
            if text.strip():
                yield number, parse(text)


@dataclass(frozen=True)
class Table(Chunk):
    """Rows of an Arrow table or record batch, from number ``row`` on."""

    row: int
    data: Any

    def rows(self) -> Iterator[Row]:
        try:
            rows = iter(self.data.to_pylist())
        except Exception:  # of many kinds: a date in the year 10000, bytes that are not UTF-8, what comes next
            rows = map(self._row, range(len(self.data)))
        return enumerate(rows, self.row)

    def _row(self, at: int) -> Any:
        row, column = {}, ""
        try:
            for column, values in zip(self.data.schema.names, self.data.columns, strict=True):
                row[column] = values[at].as_py()
        except Exception as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "the row cannot be read"
            return InvalidRow(reason, f"column {column}: {error or type(error).__name__}")
        return row


@dataclass(frozen=True)
class Entries(Chunk):
    """Entries with their lines, or JSON texts of them."""

    entries: Sequence[Row]

    def rows(self) -> Iterator[Row]:
        return ((line, parse(entry) if isinstance(entry, bytes) else entry) for line, entry in self.entries)


def parse(text: bytes) -> Any:
    """The JSON value of ``text``, or an ``InvalidRow``."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(text.decode())  # also takes NaN and half surrogates
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return InvalidRow("not UTF-8", f"byte {error.start} of the entry; save the file as UTF-8")
    except UnicodeEncodeError:
        return InvalidRow("not UTF-8", r"a \u escape is half of a surrogate pair")
    except json.JSONDecodeError as error:
        return InvalidRow("not JSON", f"{error.msg}: character {error.pos + 1} of the entry")
    except (ValueError, RecursionError) as error:
        return InvalidRow("not JSON", str(error))
    return value
