"""Finds where the entries of a long JSON array begin and end, without parsing them, as the file streams by.

Entries are told apart by brackets and quotation marks, and parsing is left to others. An entry whose brackets and
quotation marks cannot be right is passed over, up to the next place where one begins as the others do.
"""

from __future__ import annotations

import re

from data_prep.beginnings import KEY, NESTED_KEY, Beginnings
from data_prep.entries import OddEntry

STRING_INSIDE = rb'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+'
# Up to the next bracket: text, strings with a mark of punctuation behind them, colons.
BRACKET = re.compile(
    rb'(?:[^"\[\]{}:]++|"' + STRING_INSIDE + rb'"(?=\s*+[:,\]}])|:(?!\s*+(?:[\[{]|\Z)))*+'
    rb"(?:([\]}])|(:\s*+)?([\[{]))?"
)
UNENDED = re.compile(rb'\Z|:\s*+\Z|"' + STRING_INSIDE + rb'(?:\\?|"\s*+)\Z')
STRING = re.compile(rb'"' + STRING_INSIDE + rb'(?:(")|(\\?\Z))?')
WORD = re.compile(rb'[^\s,\[\]{}"]++(\Z)?')
BEGINNING = re.compile(rb"[^\s,]")
SPACE = re.compile(rb"\s*+")
# A comma and on the same line a key: the bracket before it was one too many. Group 1 is None if nobody knows yet.
FIELD = re.compile(rb'\s*+,[ \t]*+(?:\Z|"' + STRING_INSIDE + rb'(?:\\?\Z|"\s*+(?:\Z|(:))))')
LAST_END = re.compile(rb"\]\s*+\Z")

SURPLUS = b",]}"
"""Behind a bracket that would end the array, these say that it is one too many."""

OPENERS = {b"]": b"[", b"}": b"{"}

KEPT = 1 << 20
"""Bytes of a broken entry that are kept for a look at them; an entry longer than that is checked for others in it."""

LEAD = 256
"""White space before an entry is known up to here."""

Text = tuple[int, bytes | OddEntry]


class Splitter:
    """Gets a file's bytes block by block and returns the entries that are complete, with their lines.

    A file that does not begin with ``[`` is taken for one value after another. What is broken comes as it is, up to
    the next entry, or as an odd one if that is very long.

    Args:
        largest: bytes of an entry at most; beyond, a quotation mark or bracket must be missing.

    Attributes:
        is_open: whether the array has begun and not ended.
        was_cut: after :meth:`end`, whether the last entry does not end.
    """

    def __init__(self, largest: int) -> None:
        self.is_open = False
        self.was_cut = False
        self._largest = largest
        self._known = Beginnings()
        self._has_arrays = self._begun = False
        self._buffer = b"\n"  # so that the first entry begins on a line, too
        self._line, self._counted = 0, 0  # the line at a place in the buffer
        self._at = 0  # up to here the buffer is understood
        self._stack: list[bytes] | None = None  # open brackets of the entry in progress
        self._start = 0  # of that entry
        self._lead, self._follows, self._is_first = b"", False, True  # what is before it: space, another entry
        self._is_broken = False
        self._first_line, self._lost, self._reason = 0, 0, "not JSON"  # of a broken one
        self._nested: set[bytes] = set()  # first keys of objects in it
        self._nested_to = 0

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
        self._at, self._start, self._counted = self._at - keep, self._start - keep, 0
        self._nested_to = max(0, self._nested_to - keep)
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
                    pending > KEPT and self._known.another_begins(self._buffer, self._start + 1, len(self._buffer))
                ):
                    self._break()
                return self._is_broken
            if not whole:
                self._break()
                return True
        goes_on = self._goes_on(self._at, ends)
        if goes_on is None:
            return False
        if goes_on and not self._known.another_begins(self._buffer, self._start + 1, self._at):
            self._close(found)
        else:
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
        if after == b"," and not self._known.are_lines:
            return True
        if after == b",":
            field = FIELD.match(self._buffer, end)
            if field is None or field[1] is not None:
                return field is None
            return True if ends or len(self._buffer) - end > KEPT else None
        if not self.is_open:
            return self._buffer[end] in b" \t\r\n" and after not in b"]}:"
        if after in b"{[":
            return b"\n" in self._buffer[end : self._buffer.index(after, end)]
        if after != b"]":
            return False
        after = self._after(self._buffer.index(b"]", end) + 1, ends)
        return None if after is None else not after or after not in SURPLUS

    def _close(self, found: list[Text]) -> None:
        """The entry in progress is whole."""
        self._count(self._start)
        text = self._buffer[self._start : self._at]
        found.append((self._line, text))
        self._known.learn(self._lead, text, follows=self._follows)
        self._known.look_into(text)
        self._stack = None

    def _break(self, reason: str = "not JSON") -> None:
        """The entry in progress is broken: from now on the next one is sought."""
        self._count(self._start)
        self._known.learn(self._lead, self._buffer[self._start : self._start + KEPT], follows=self._follows)
        self._is_broken, self._stack, self._at = True, None, self._start
        self._first_line, self._lost, self._reason = self._line, 0, reason
        self._nested, self._nested_to = set(), self._start

    def _seek(self, found: list[Text], ends: bool) -> bool:
        """Looks behind a broken entry for the next one."""
        for lead, place in self._known.candidates(self._buffer, self._at, len(self._buffer)):
            begins = self._begins(place, ends)
            if begins is None:
                self._at = max(lead - 1, self._start)
                return False
            if begins:
                self._pass_over(lead, found)
                return True
        if self._known.are_lines and (ends or len(self._buffer) - self._start > KEPT):
            self._known.forget_lines()
            self._at = self._start
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
            detail = f"{passed}; a quotation mark or bracket is missing"
            found.append((self._first_line, OddEntry(self._reason, detail)))
        else:
            found.append((self._first_line, text))
        self._is_broken, self._at = False, end

    def _begins(self, place: int, ends: bool) -> bool | None:
        """Whether an entry begins at ``place``; None: more bytes are needed to say so."""
        self._nested.update(found[1] for found in NESTED_KEY.finditer(self._buffer, self._nested_to, place))
        self._nested_to = max(self._nested_to, place - LEAD)
        ahead = len(self._buffer) - place
        key = KEY.match(self._buffer, place)
        is_known = key is not None and key[1] in self._known.keys
        is_nested = key is not None and key[1] in self._nested
        if is_known and (self._known.are_lines or not is_nested):
            return True
        if is_nested and not is_known:
            return False
        if not ends and ahead < KEPT:
            return None
        if self._known.are_lines:
            end = self._value_end(place)
            return end is not None and bool(self._goes_on(end, ends))
        return key is not None and self._is_in_a_row(place, ends)

    def _value_end(self, place: int) -> int | None:
        """Where the value at ``place`` ends, None if it is not whole."""
        first = self._buffer[place : place + 1]
        if first in b"[{":
            end, is_whole = self._scan(place + 1, [first])
            whole = is_whole is True
        else:
            scalar = (STRING if first == b'"' else WORD).match(self._buffer, place)
            whole = scalar is not None and (first != b'"' or scalar[1] is not None)
            end = scalar.end() if scalar else place
        return end if whole else None

    def _is_in_a_row(self, place: int, ends: bool) -> bool:
        """Whether the value at ``place`` is whole and not one of a list within an entry, as far as one can see."""
        at = place
        while at - place < KEPT:
            end = self._value_end(at)
            if end is not None and self._after(end, ends) == b"]":
                return not self._after(self._buffer.index(b"]", end) + 1, ends)
            if end is None or not self._goes_on(end, ends):
                return at > place
            following = BEGINNING.search(self._buffer, end)
            if following is None:
                break
            at = following.start()
            key = KEY.match(self._buffer, at)
            if key is not None and key[1] in self._known.keys and key[1] not in self._nested:
                break
        return True

    def _count(self, place: int) -> None:
        """Moves the counted line to ``place``."""
        if place > self._counted:
            self._line += self._buffer.count(b"\n", self._counted, place)
            self._counted = place
