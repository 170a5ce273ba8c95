"""Finds where the entries of a long JSON array begin and end, without parsing them, as the file streams by.

Entries are told apart by brackets and quotation marks alone: a broken entry among whole ones costs nothing but
itself, and parsing is left to others.
"""

from __future__ import annotations

import re

# Inside of an entry only strings and brackets matter; group 1 is empty for a string that has not ended yet.
NESTED = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}]', re.S)
SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[^\s,\[\]{}"]++', re.S)
BEGINNING = re.compile(rb"[^\s,]")


class Splitter:
    """Gets a file's bytes block by block and returns the entries that are complete, with their lines.

    A file that does not begin with ``[`` is taken for one value after another.

    Attributes:
        is_open: whether the array has begun and not ended.
        depth: open brackets of the entry in progress, 0 between entries.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.depth = 0
        self._begun = False
        self._buffer = b""
        self._start = 0  # of the entry in progress
        self._at = 0  # up to here the buffer is understood
        self._line, self._counted = 1, 0  # the line at a place in the buffer

    def feed(self, block: bytes) -> list[tuple[int, bytes]]:
        """The entries that ``block`` completes."""
        keep = self._start if self.depth else self._at
        self._count(keep)
        self._buffer = self._buffer[keep:] + block
        self._at, self._start, self._counted = self._at - keep, 0, 0
        found: list[tuple[int, bytes]] = []
        while self._advance(found, ends=not block):
            pass
        return found

    def end(self) -> list[tuple[int, bytes]]:
        """What is left at the end of the file: perhaps a last value, perhaps an entry that was cut off."""
        found = self.feed(b"")
        if self.depth:
            self._close(len(self._buffer), found)
        self._count(len(self._buffer))
        return found

    @property
    def line(self) -> int:
        """The line of the entry in progress; after :meth:`end` the file's last."""
        return self._line + self._buffer.count(b"\n", self._counted, self._start)

    @property
    def pending(self) -> int:
        """Bytes of the entry in progress."""
        return len(self._buffer) - self._start if self.depth else 0

    def _advance(self, found: list[tuple[int, bytes]], *, ends: bool) -> bool:
        """Goes on to the next end or beginning of an entry; False: more bytes are needed."""
        if self.depth:
            return self._find_end(found)
        beginning = BEGINNING.search(self._buffer, self._at)
        if beginning is None:
            self._at = len(self._buffer)
            return False
        self._start = beginning.start()
        first = beginning[0]
        if first == b"[" and not self._begun:
            self.is_open, self._at = True, self._start + 1
        elif first == b"]" and self.is_open:
            self.is_open, self._at = False, self._start + 1
        elif first in b"[{":
            self.depth, self._at = 1, self._start + 1
        elif first in b"]}":
            self._close(self._start + 1, found)
        else:
            scalar = SCALAR.match(self._buffer, self._start)
            assert scalar is not None
            if not ends and (scalar.end() == len(self._buffer) or scalar[1] == b""):
                self._at = self._start  # it may go on in the next block
                return False
            self._close(scalar.end(), found)
        self._begun = True
        return True

    def _find_end(self, found: list[tuple[int, bytes]]) -> bool:
        for token in NESTED.finditer(self._buffer, self._at):
            if token[1] == b"":
                self._at = token.start()
                return False
            self._at = token.end()
            if token[1] is None:
                self.depth += 1 if token[0] in b"[{" else -1
                if not self.depth:
                    self._close(self._at, found)
                    return True
        self._at = len(self._buffer)
        return False

    def _close(self, end: int, found: list[tuple[int, bytes]]) -> None:
        self._count(self._start)
        found.append((self._line, self._buffer[self._start : end]))
        self._at, self.depth = end, 0

    def _count(self, place: int) -> None:
        """Moves the counted line to ``place``."""
        self._line += self._buffer.count(b"\n", self._counted, place)
        self._counted = place
