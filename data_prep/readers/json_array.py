"""Finds where the entries of a long JSON array begin and end as the file streams by.

1. Text whose brackets agree and that parses is an entry, whatever it looks like.
2. Behind anything else reading goes on where the next entry begins as the others do: where a line has a known
   indentation and then a known first key or, in a file whose entries share lines, at the next object that has a known
   first key, is whole and has behind it what may follow an entry.
3. If there is none, the rest of the file is one odd entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from data_prep.readers.chunks import parse
from specforge_dspine.utils.invalid_row import InvalidRow

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


# Up to the next bracket: text, strings with a mark of punctuation behind them, colons.
BRACKET = re.compile(
    rb'(?:[^"\[\]{}:]++|"' + INSIDE + rb'"(?=\s*+[:,\]}])|:(?!\s*+(?:[\[{]|\Z)))*+'
    rb"(?:([\]}])|(:\s*+)?([\[{]))?"
)
UNENDED = re.compile(rb'\Z|:\s*+\Z|"' + INSIDE + rb'(?:\\?|"\s*+)\Z')
STRING = re.compile(rb'"' + INSIDE + rb'(?:(")|(\\?\Z))?')
WORD = re.compile(rb'[^\s,\[\]{}"]++(\Z)?')
BEGINNING = re.compile(rb"[^\s,]")
SPACE = re.compile(rb"\s*+")
# A comma and on the same line a key: the bracket before it was one too many. Without groups nobody knows yet.
FIELD = re.compile(rb'\s*+,[ \t]*+(?:\Z|"(?:' + INSIDE + rb"\\?\Z|(" + INSIDE + rb')"\s*+(?:\Z|(:))))')
LAST_END = re.compile(rb"\]\s*+\Z")
SURPLUS = b",]}"
"""Behind a bracket that would end the array, these say that it is one too many."""
OPENERS = {b"]": b"[", b"}": b"{"}
KEPT = 1 << 20
"""Bytes of a broken entry that are kept for a look at them; as many are tried in vain before the rest is given up."""
LEAD = 256
"""White space before an entry is known up to here."""
Text = tuple[int, bytes | InvalidRow]


class Splitter:
    """Gets a file's bytes block by block and returns the entries that are complete, with their lines.

    A file that does not begin with ``[`` is taken for one value after another. What does not parse comes as an odd
    entry, up to the next one.

    Args:
        largest: bytes of an entry at most; beyond, a quotation mark or bracket must be missing.

    Attributes:
        is_open: whether the array has begun and not ended.
        was_cut: after :meth:`end`, whether the last entry does not end.
    """

    def __init__(self, largest: int) -> None:
        self.is_open = False
        self.was_cut = False
        self._largest = self._patience = largest
        self._known = Beginnings()
        self._has_arrays = self._begun = False
        self._buffer = b""
        self._offset = 0  # of the buffer in the file
        self._line, self._counted = 1, 0  # the line at a place in the buffer
        self._at = 0  # up to here the buffer is understood
        self._stack: list[bytes] | None = None  # open brackets of the entry in progress
        self._start = 0  # of that entry
        self._lead, self._follows, self._is_first = b"", False, True  # what is before it: space, another entry
        self._is_broken = False
        self._first_byte = 0  # of the entry in progress
        self._first_line, self._lost, self._reason = 0, 0, "not JSON"  # of a broken one
        self._nested: set[bytes] = set()  # first keys that objects within entries have, too
        self._inside: set[bytes] = set()  # the same, of the broken entry
        self._inside_to = 0
        self._tried = 0  # bytes that looked like an entry and are none

    def feed(self, block: bytes) -> list[Text]:
        """The entries that ``block`` completes."""
        return self._take(block, ends=not block)

    def end(self) -> list[Text]:
        """What is left at the end of the file: perhaps a last value, perhaps an entry that was cut off."""
        found = self.feed(b"")
        self._count(len(self._buffer))
        return found

    @property
    def line(self) -> int:
        """After :meth:`end` the file's last line."""
        return self._line

    def _take(self, block: bytes, *, ends: bool) -> list[Text]:
        if self._is_broken and self._at - self._start > KEPT:
            self._lost += self._at - self._start
            self._start = self._at
        keep = self._at if self._stack is None and not self._is_broken else self._start
        self._count(keep)
        self._buffer = self._buffer[keep:] + block
        self._offset += keep
        self._inside_to = max(0, self._inside_to - keep)
        self._at, self._start, self._counted = self._at - keep, self._start - keep, 0
        found: list[Text] = []
        while self._advance(found, ends):
            pass
        return found

    def _advance(self, found: list[Text], ends: bool) -> bool:
        """Goes on to the next end or beginning of an entry; False: more bytes are needed."""
        if self._is_broken:
            return self._seek(found, ends)
        if self._stack is None:
            return self._begin(ends)
        if self._stack:
            self._at, whole = self._scan(self._at, self._stack)
            if whole is None:
                pending = len(self._buffer) - self._start
                if pending > self._largest:
                    self._break(f"longer than {self._largest >> 20} MiB")
                elif ends or (
                    pending > self._patience
                    and self._known.another_begins(self._buffer, self._start + 1, len(self._buffer))
                ):
                    self._break()
                if self._is_broken and pending > KEPT:
                    self._patience = KEPT  # else many entries without end would each be followed that far
                return self._is_broken
            if not whole:
                self._break()
                return True
        goes_on = self._goes_on(self._at, ends)
        if goes_on is None:
            return False
        if not goes_on or not self._close(found):
            self._break()
        return True

    def _begin(self, ends: bool) -> bool:
        """Finds the next entry, or the array's beginning or end."""
        beginning = BEGINNING.search(self._buffer, self._at)
        if beginning is None:
            self._at = max(self._at, self._buffer.rfind(b"\n", self._at), len(self._buffer) - LEAD)
            return False
        place, first = beginning.start(), beginning[0]
        if first == b"[" and not self.is_open and (self._has_arrays or not self._begun):
            self.is_open = self._has_arrays = self._begun = self._is_first = True
            self._at = place + 1
            return True
        if first == b"]" and self.is_open:
            after = self._after(place + 1, ends)
            if after is None:
                return False
            if not after or after not in SURPLUS:
                self.is_open, self._at = False, place + 1
                return True
        return self._enter(place, first, ends)

    def _enter(self, place: int, first: bytes, ends: bool) -> bool:
        """Begins with the entry at ``place``."""
        stack, at, is_right = [first], place + 1, first not in b"]}"
        if first not in b"[{]}":
            scalar = (STRING if first == b'"' else WORD).match(self._buffer, place)
            assert scalar is not None
            if scalar[scalar.re.groups] is not None and not ends and len(self._buffer) - place <= self._largest:
                return False  # it may go on in the next block
            stack, at = [], scalar.end()
            is_right = scalar.re is WORD or scalar[1] is not None
        self._lead, self._follows = self._buffer[self._at : place], not self._is_first
        self._begun, self._is_first = True, False
        self._start, self._at, self._stack = place, at, stack
        self._first_byte = self._offset + place
        if not is_right:
            self._break()
        return True

    def _scan(self, at: int, stack: list[bytes]) -> tuple[int, bool | None]:
        """Follows brackets until the value ends (True), cannot be right (False), or bytes are missing (None)."""
        while True:
            found = BRACKET.match(self._buffer, at)
            assert found is not None
            closer, colon, opener = found.groups()
            if closer is not None:
                if stack.pop() != OPENERS[closer]:
                    return found.end(), False
                if not stack:
                    return found.end(), True
            elif opener is not None:
                if (stack[-1] == b"{") != (colon is not None):
                    return found.end(), False
                stack.append(opener)
            else:
                return found.end(), None if UNENDED.match(self._buffer, found.end()) else False
            at = found.end()

    def _after(self, place: int, ends: bool) -> bytes | None:
        """The next byte that is no white space; empty at the end of the file, None if nobody knows yet."""
        space = SPACE.match(self._buffer, place)
        assert space is not None
        byte = self._buffer[space.end() : space.end() + 1]
        return byte if byte or ends else None

    def _goes_on(self, end: int, ends: bool) -> bool | None:
        """Whether behind a value that ended something comes that may; a comma may be missing."""
        after = self._after(end, ends)
        if not after:
            return None if after is None else True
        if after == b",":
            field = FIELD.match(self._buffer, end)
            if field is None or field[2] is not None:
                return field is None or (field[1] in self._known.keys and not self._known.are_lines)
            return True if ends or len(self._buffer) - end > KEPT else None
        if not self.is_open:
            return self._buffer[end] in b" \t\r\n" and after not in b"]}:"
        if after in b"{[":
            return b"\n" in self._buffer[end : self._buffer.index(after, end)]
        if after != b"]":
            return False
        after = self._after(self._buffer.index(b"]", end) + 1, ends)
        return None if after is None else not after or after not in SURPLUS

    def _close(self, found: list[Text]) -> bool:
        """Takes the entry in progress, whose brackets agree; False: it does not parse, and others are in it."""
        self._count(self._start)
        text = self._buffer[self._start : self._at]
        read = self._read(text, self._line)
        if isinstance(read, InvalidRow) and read.reason == "not JSON":
            if self._known.another_begins(text, 1, len(text)):
                return False
            self._known.learn(self._lead, text, follows=self._follows, whole=False)
        else:
            self._known.learn(self._lead, text, follows=self._follows, whole=True)
        found.append((self._line, read))
        self._stack = None
        return True

    def _read(self, text: bytes, line: int) -> bytes | InvalidRow:
        """``text`` itself if it parses; else what is wrong with it."""
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            odd = parse(text, line)
            if isinstance(odd, InvalidRow):
                return self._located(odd.reason, odd.detail)
        return text

    def _located(self, reason: str, detail: str) -> InvalidRow:
        """An odd entry that begins where the one in progress does; among others on a line it needs more than that."""
        if b"\n" not in self._lead:
            detail = f"{detail}; the entry begins at byte {self._first_byte} of the file"
        return InvalidRow(reason, detail)

    def _break(self, reason: str = "not JSON") -> None:
        """The entry in progress is broken: from now on the next one is sought."""
        self._count(self._start)
        text = self._buffer[self._start : self._start + KEPT]
        self._known.learn(self._lead, text, follows=self._follows, whole=False)
        self._is_broken, self._stack, self._at = True, None, self._start
        self._first_line, self._lost, self._reason = self._line, 0, reason
        self._inside, self._inside_to = set(), self._start
        self._nested, self._tried = set(self._known.first_keys(self._known.last, 1, KEPT)), 0

    def _seek(self, found: list[Text], ends: bool) -> bool:
        """Looks behind a broken entry for the next one."""
        for lead, place in self._known.candidates(self._buffer, max(self._at, self._start + 1), len(self._buffer)):
            if self._tried > KEPT:
                break
            begins = self._begins(place, ends)
            if begins is None:
                self._at = max(lead - 1, self._start)
                return False
            if begins:
                self._pass_over(lead, found)
                return True
        if ends:
            self.was_cut = True
            last = LAST_END.search(self._buffer, self._start) if self.is_open else None
            if last is not None:
                self.is_open = self.was_cut = False
            self._pass_over(last.start() if last else len(self._buffer), found)
            self._at = len(self._buffer)
        else:
            self._at = max(self._at, len(self._buffer) - LEAD)
        return ends

    def _pass_over(self, end: int, found: list[Text]) -> None:
        """The broken entry reaches up to ``end``."""
        text = self._buffer[self._start : end].rstrip(b", \t\r\n")
        if self._lost or len(text) > KEPT or self._reason != "not JSON":
            self._count(self._start + len(text))
            size = self._lost + len(text)
            passed = f"lines {self._first_line} to {self._line}, {size} bytes, were passed over"
            odd = self._located(self._reason, f"{passed}; a quotation mark or bracket is missing")
            found.append((self._first_line, odd))
        else:
            found.append((self._first_line, self._read(text, self._first_line)))
        self._is_broken, self._at = False, end

    def _begins(self, place: int, ends: bool) -> bool | None:
        """Whether an entry begins at ``place``; None: more bytes are needed to say so."""
        may_wait = not ends and len(self._buffer) - place < KEPT
        if may_wait and UNENDED_KEY.match(self._buffer, place):
            return None
        key = KEY.match(self._buffer, place)
        is_known = key is not None and key[1] in self._known.keys
        is_nested = key is not None and key[1] in self._nested
        if is_known and self._known.are_lines and not is_nested:
            return True
        if not is_known and self._known.keys:
            self._inside.update(found[1] for found in NESTED_KEY.finditer(self._buffer, self._inside_to, place))
            self._inside_to = max(self._inside_to, place - LEAD)
            if not self._known.are_lines or (key is None and self._known.spread) or (key and key[1] in self._inside):
                return False
        end, is_whole = self._value_end(place)
        goes_on = self._goes_on(end, ends) if is_whole else is_whole
        if goes_on is None and may_wait:
            return None
        self._tried += end - place
        if not goes_on:
            return False
        value = parse(self._buffer[place:end])
        return not isinstance(value, InvalidRow) and (not is_nested or self._has_the_keys_of_the_last(value))

    def _has_the_keys_of_the_last(self, value: object) -> bool:
        last = parse(self._known.last)
        return isinstance(value, dict) and isinstance(last, dict) and value.keys() == last.keys()

    def _value_end(self, place: int) -> tuple[int, bool | None]:
        """Up to where the value at ``place`` was followed, and whether it is whole; None: bytes are missing."""
        first = self._buffer[place : place + 1]
        if first in b"[{":
            return self._scan(place + 1, [first])
        scalar = (STRING if first == b'"' else WORD).match(self._buffer, place)
        assert scalar is not None
        if scalar.re is WORD:
            return scalar.end(), None if scalar[1] is not None else True
        return scalar.end(), True if scalar[1] else None if scalar[2] is not None else False

    def _count(self, place: int) -> None:
        """Moves the counted line to ``place``."""
        if place > self._counted:
            self._line += self._buffer.count(b"\n", self._counted, place)
            self._counted = place
