"""How the entries of one file begin, learned from those that were read: where the next one is to be sought.

Behind an entry that does not end as it should, brackets and quotation marks say nothing any more. But files are
written by programs, and their entries look alike: each begins with one of a few keys, and in most files on a line of
its own with the same indentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

INSIDE = rb'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+'
KEY = re.compile(rb'\{\s*+"(' + INSIDE + rb')"')
UNENDED_KEY = re.compile(rb"\{\s*+(?:\"" + INSIDE + rb"\\?)?\Z")
KEY_OF_A_BROKEN_ONE = re.compile(rb'[\s{"]*+([^"\\\x00-\x1f]++)"')
NESTED_KEY = re.compile(rb"[\[:]\s*+" + KEY.pattern)
BESIDE = re.compile(rb"(?:[,}\]]|[^\s:\[]\s)(\s*+)(?=\{)")

MANY_KEYS, MANY_INDENTS = 256, 16
"""So many are remembered; a file with more has no layout."""


class Beginnings:
    """What is known of a file's layout.

    Attributes:
        keys: first keys of entries.
        last: the last whole entry.
        spread: whether an entry had more than one line, or none was whole yet.
    """

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.last = b""
        self._indents: set[bytes] = set()
        self._line_start = BESIDE
        self._on_lines = self._beside = 0
        self.spread = True

    @property
    def are_lines(self) -> bool:
        """Whether most entries begin on a line of their own."""
        return self._on_lines > self._beside

    def learn(self, lead: bytes, text: bytes, *, follows: bool, whole: bool) -> None:
        """``text`` is an entry or its beginning; ``lead`` the white space and commas before it.

        ``follows`` says whether another entry is before it: the first one may stand beside the array's bracket.
        The first key of an entry that is not ``whole`` counts only as long as no better is known.
        """
        key = KEY.match(text) or (KEY_OF_A_BROKEN_ONE.match(text) if not whole and not self.keys else None)
        if key is not None and len(self.keys) < MANY_KEYS:
            self.keys.add(key[1])
        if whole:
            self.spread = b"\n" in text or (self.spread and bool(self.last))
            self.last = text
        _, newline, indent = lead.rpartition(b"\n")
        self._on_lines += bool(newline)
        self._beside += not newline and follows
        if newline and indent not in self._indents and len(self._indents) < MANY_INDENTS:
            self._indents.add(indent)
            self._line_start = re.compile(
                rb"(\n(?:%s))(?=[^\s,\]}])" % b"|".join(map(re.escape, sorted(self._indents)))
            )

    def candidates(self, text: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where between ``start`` and ``end`` an entry may begin: the place of its lead, and its own."""
        pattern = self._line_start if self.are_lines else BESIDE
        return ((match.start(1), match.end()) for match in pattern.finditer(text, start, end))

    def first_keys(self, text: bytes, start: int, end: int) -> Iterator[bytes]:
        """First keys of the objects that begin where an entry may."""
        keys = (KEY.match(text, place) for _, place in self.candidates(text, start, end))
        return (key[1] for key in keys if key is not None)

    def another_begins(self, text: bytes, start: int, end: int) -> bool:
        """Whether between ``start`` and ``end`` something begins as entries do."""
        return any(key in self.keys for key in self.first_keys(text, start, end))
