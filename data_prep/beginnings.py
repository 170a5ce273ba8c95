"""How the entries of one file begin, learned from those that were read: where the next one is to be sought.

Behind an entry that does not end as it should, brackets and quotation marks say nothing any more. But files are
written by programs, and their entries look alike: each begins on a line of its own with the same indentation, or at
least with one of a few keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

KEY = re.compile(rb'\{\s*+"((?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+)"')
NESTED_KEY = re.compile(rb'[\[:]\s*+\{\s*+"((?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+)"')
ON_A_LINE = re.compile(rb"[,}\]](\s*+)(?=\{)")

MANY_KEYS, MANY_INDENTS = 256, 16
"""So many are remembered; a file with more has no layout."""

RARE = 20
"""So many times as often entries begin on a line of their own, where that is the layout."""


class Beginnings:
    """What is known of a file's layout.

    Attributes:
        keys: first keys of entries.
    """

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self._indents: set[bytes] = set()
        self._line_start = ON_A_LINE
        self._on_lines = self._beside = 0
        self._nests_alike = False

    @property
    def are_lines(self) -> bool:
        """Whether entries, and nothing else, begin at a known indentation."""
        return self._on_lines > RARE * self._beside and not self._nests_alike

    def learn(self, lead: bytes, text: bytes, *, follows: bool) -> None:
        """``text`` is an entry or its beginning; ``lead`` the white space and commas before it.

        ``follows`` says whether another entry is before it: the first one may stand beside the array's bracket.
        """
        key = KEY.match(text)
        if key is not None and len(self.keys) < MANY_KEYS:
            self.keys.add(key[1])
        if not text.startswith((b"{", b"[")):
            return  # perhaps the bracket is what is missing
        _, newline, indent = lead.rpartition(b"\n")
        self._on_lines += bool(newline)
        self._beside += not newline and follows
        if newline and indent not in self._indents and len(self._indents) < MANY_INDENTS:
            self._indents.add(indent)
            self._line_start = re.compile(
                rb"(\n(?:%s))(?=[^\s,\]}])" % b"|".join(map(re.escape, sorted(self._indents)))
            )

    def look_into(self, text: bytes) -> None:
        """``text`` is a whole entry: notes whether something in it begins as entries do."""
        if not self._nests_alike and self._indents and b"\n" in text:
            self._nests_alike = self._line_start.search(text) is not None

    def forget_lines(self) -> None:
        """Entries do not begin at known indentations after all."""
        self._on_lines, self._beside = 0, 1

    def candidates(self, text: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where between ``start`` and ``end`` an entry may begin: the place of its lead, and its own."""
        pattern = self._line_start if self.are_lines else ON_A_LINE
        return ((match.start(1), match.end()) for match in pattern.finditer(text, start, end))

    def another_begins(self, text: bytes, start: int, end: int) -> bool:
        """Whether between ``start`` and ``end`` something begins that can only be another entry."""
        return self.are_lines and any(
            (key := KEY.match(text, place)) is not None and key[1] in self.keys
            for _, place in self.candidates(text, start, end)
        )
