"""Entries of a JSON array, or of JSON values one after another, as the file streams by.

``ijson`` checks the text and tells where values begin and end. The text of each object is cut out, for a worker to
parse. At the first error reading ends: what came before is kept, the rest of the file is one dropped row.
"""

from __future__ import annotations

import re

import ijson

from specforge_dspine.utils.errors import InvalidRow

Entry = tuple[int, bytes | InvalidRow]
"""The line on which an entry begins, from 1, and its text, or why it cannot be used."""

OPENING, CLOSING = ("start_map", "start_array"), ("end_map", "end_array")
PIECE_END = re.compile(rb"[,}]|(?=\{)")  # outside of objects, so that every object begins and ends with a piece
SEPARATORS = b", \t\r\n[]"
PARSER_ERRORS = (ijson.JSONError, ValueError, ArithmeticError, SystemError)
"""Of syntax, of bytes that are not UTF-8, of numbers without bound (SystemError: by the C backend)."""
REST_INVALID = "the rest of the file is not valid JSON"


class EntryReader:
    """Takes a file's bytes block by block and returns the entries that are complete.

    An entry has at most ``largest`` bytes; the first block begins at byte ``offset`` of the file.
    """

    def __init__(self, largest: int, offset: int = 0) -> None:
        self.line = 1  # that was reached
        self.has_failed = False  # whether the last entry returned stands for the rest of the file
        self._largest = largest
        self._events = ijson.sendable_list()
        self._parser = ijson.basic_parse_coro(self._events, multiple_values=True)
        self._depth = self._entry_depth = 0  # entries are at depth 1 of an array, else at depth 0
        self._in_object = False  # whether the entry under way is an object
        self._is_blank = True
        self._block, self._start = b"", 0  # what was fed last, and where in it the entry under way begins
        self._offset = offset  # of that entry in the file

    def feed(self, block: bytes) -> list[Entry]:
        """The entries that ``block`` completes."""
        found: list[Entry] = []
        at = len(self._block) - self._start
        self._block, self._start = self._block[self._start :] + block, 0
        try:
            while at < len(self._block):
                end = self._next_piece(at)
                self._parser.send(self._block[at:end])
                self._take_events(at, end, found)
                at = end
        except PARSER_ERRORS as error:
            words = str(error.__cause__ or error).removeprefix("b'")  # bytes, if they are not UTF-8
            found.append(self._rest(re.split(r"\n|\\n", words)[0].rstrip(".")))
        else:
            if at - self._start > self._largest:
                problem = f"an entry is longer than {self._largest >> 20} MiB"
                found.append(self._rest(f"{problem}, so that a quotation mark or bracket is missing"))
        return found

    def end(self) -> list[Entry]:
        """What is left at the end of the file."""
        found: list[Entry] = []
        if not self._is_blank:
            try:
                self._parser.close()
                self._take_events(self._start, len(self._block), found)
            except PARSER_ERRORS:
                found.append(self._rest("it ends too early; fetch it again"))
        return found

    def _next_piece(self, at: int) -> int:
        """Where the piece from ``at`` on ends; what separates it from the last entry is passed over."""
        if self._in_object:
            return self._block.find(b"}", at) + 1 or len(self._block)
        match = PIECE_END.search(self._block, at + 1)
        end = match.end() if match else len(self._block)
        piece = self._block[at:end]
        self._is_blank = self._is_blank and piece.isspace()
        if at == self._start:
            self._move_start(end - len(piece.lstrip(SEPARATORS)))
        return end

    def _take_events(self, at: int, end: int, found: list[Entry]) -> None:
        """What the parser found in the piece between ``at`` and ``end``."""
        depth, entry_depth = self._depth, self._entry_depth
        for event, _ in self._events:
            if event in OPENING:
                if depth == 0 and event == "start_array":
                    entry_depth = 1
                elif depth == entry_depth and event == "start_map":
                    self._in_object = True
                    self._move_start(at)
                depth += 1
                continue
            if event in CLOSING:
                depth -= 1
            if depth == entry_depth:
                if self._in_object:
                    found.append((self.line, self._block[self._start : end]))
                else:
                    found.append((self.line, InvalidRow("not a JSON object", event.removeprefix("end_"))))
                self._in_object = False
                self._move_start(end)
            elif depth == 0:  # the array ended
                entry_depth = 0
                self._move_start(end)
        self._events.clear()
        self._depth, self._entry_depth = depth, entry_depth

    def _move_start(self, place: int) -> None:
        self.line += self._block.count(b"\n", self._start, place)
        self._offset += place - self._start
        self._start = place

    def _rest(self, why: str) -> Entry:
        self.has_failed = True
        place = f"the file is not valid JSON from byte {self._offset} (line {self.line}) on"
        return self.line, InvalidRow(REST_INVALID, f"{place}, nothing after it was read: {why}")
