"""Reads files of chat data as chunks of entries, whatever state the files are in.

A chunk is about a mebibyte of a file. Here it is only found where entries begin and end; a worker parses them. What
cannot be read comes as an odd row in place of an entry, with its line, and does not keep the rest from being read.
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from data_prep.readers.chunks import Chunk, Entries, Lines, Table, Values, parse
from data_prep.readers.json_array import Splitter, Text
from specforge_dspine.utils.files import printable
from specforge_dspine.utils.invalid_row import InvalidRow

BLOCK = 1 << 20
"""Bytes that are read at a time; a chunk holds about as many."""

PACKED_BLOCK = 1 << 16
"""The same of a compressed file."""

ZSTD_BLOCK = 256
"""Bytes that are unpacked at once: four may stand for 128 KiB, and the library knows no bound of its own."""

TABLE_ROWS = 1024
"""Rows of a table in a chunk."""

MAX_ENTRY = 64 << 20
"""Bytes of one entry; beyond, a quotation mark or bracket is missing."""

PEEKED_LINES = 3
"""Lines by which a file of one entry per line is told from one long JSON value."""

LINE_SUFFIXES, TABLE_SUFFIX = (".jsonl", ".ndjson"), ".parquet"
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of the machine, not of the file that meets them."""

PACKED_SUFFIXES = (".gz", ".zst")
SUFFIXES = (".json", *LINE_SUFFIXES, TABLE_SUFFIX)

UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


def odd_file(source: str, error: Exception) -> Entries:
    """A file of which nothing can be read, as one odd row."""
    advice = "make it readable" if isinstance(error, PermissionError) else "repair the file"
    return Entries(
        source, [(None, InvalidRow("the file cannot be read", f"{describe(error)}; {advice} and run again"))]
    )


def describe(error: Exception) -> str:
    """An error in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def file_chunks(path: Path) -> Iterator[Chunk]:
    """All of a file, chunk by chunk; what cannot be read is in it as odd rows."""
    source = printable(path)
    return readable(
        source, _table_chunks(path, source) if path.suffix == TABLE_SUFFIX else _text_chunks(path, source)
    )


def readable(source: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks, and an odd row in place of those that an error of the file keeps from being read.

    Raises:
        OSError, MemoryError: the machine is at its end, which is no fault of the file.
    """
    has_any = False
    try:
        for chunk in chunks:
            yield chunk
            has_any = True
    except MemoryError:
        raise
    except Exception as error:  # libraries raise what they like, and one file is not to end the job
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            advice = "raise the limit (ulimit -n), or leave --in-turn out; the same command continues"
            raise OSError(error.errno, f"{error.strerror}: {advice}", source) from error
        yield _broken_off(source, None, error) if has_any else odd_file(source, error)


def _table_chunks(path: Path, source: str) -> Iterator[Chunk]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        first = 1
        for group in range(file.num_row_groups):
            row, first = first, first + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(batch_size=TABLE_ROWS, row_groups=[group]):
                    yield Table(source, row, batch)
                    row += len(batch)
            except Exception as error:
                detail = f"rows {row} to {first - 1}: {describe(error)}; fetch the file again"
                yield Entries(source, [(row, InvalidRow("a part of the file cannot be read", detail))])


def _text_chunks(path: Path, source: str) -> Iterator[Chunk]:
    blocks = _Blocks(path)
    head = blocks.head()
    if head.startswith(UTF16_MARKS):
        yield odd_file(source, ValueError("it is UTF-16; save it as UTF-8"))
        return
    if holds_lines(head, path):
        yield from line_chunks(blocks, source)
    else:
        yield from value_chunks(blocks, source)


class _Blocks:
    """A text file's bytes, unpacked, without a UTF-8 mark; ``error`` says why it ended before its time."""

    def __init__(self, path: Path) -> None:
        self.error: Exception | None = None
        self._raw = _unpacked(path)
        self._head: bytes | None = None

    def head(self) -> bytes:
        """The first block."""
        if self._head is None:
            self._head = self._next().removeprefix(UTF8_MARK)
        return self._head

    def __iter__(self) -> Iterator[bytes]:
        block = self.head()
        while block:
            yield block
            block = self._next()

    def _next(self) -> bytes:
        try:
            return next(filter(None, self._raw), b"")
        except Exception as error:
            if self._head is None and isinstance(error, OSError):
                raise  # there is nothing to read at all
            self.error = error
            return b""


def _unpacked(path: Path) -> Iterator[bytes]:
    """The file's bytes, about ``BLOCK`` of them at a time, however well they were packed."""
    with path.open("rb") as file:
        if path.suffix not in PACKED_SUFFIXES:
            yield from iter(lambda: file.read(BLOCK), b"")
            return
        unpack = _gunzip if path.suffix == ".gz" else _unzstd
        block = bytearray()
        try:
            for part in unpack(file):
                block += part
                while len(block) >= BLOCK:
                    yield bytes(block[:BLOCK])
                    del block[:BLOCK]
        except (zlib.error, zstandard.ZstdError, EOFError):
            yield bytes(block)
            raise
        yield bytes(block)


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    unpacker = None
    for data in iter(lambda: file.read(PACKED_BLOCK), b""):
        while data.strip(b"\0") or (data and unpacker is not None):  # zeros may follow the last member
            unpacker = unpacker or zlib.decompressobj(31)
            yield unpacker.decompress(data, BLOCK)
            data = unpacker.unconsumed_tail
            if unpacker.eof:
                data, unpacker = unpacker.unused_data, None
    if unpacker is not None:  # the library does not say so by itself
        raise EOFError("the compressed data end too early")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    unpacker = None
    for block in iter(lambda: file.read(PACKED_BLOCK), b""):
        for at in range(0, len(block), ZSTD_BLOCK):
            data = block[at : at + ZSTD_BLOCK]
            while data:
                unpacker = unpacker or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield unpacker.decompress(data)
                if not unpacker.eof:
                    break
                data, unpacker = unpacker.unused_data, None
    if unpacker is not None:
        raise EOFError("the compressed data end too early")


def holds_lines(head: bytes, path: Path) -> bool:
    """Whether a file that begins with ``head`` has an entry per line, rather than one array or long values."""
    if any(suffix in LINE_SUFFIXES for suffix in path.suffixes):
        return True
    lines = [line for line in head.split(b"\n", PEEKED_LINES)[:PEEKED_LINES] if line.strip()]
    first = parse(lines[0]) if lines else None
    return isinstance(first, dict) or (isinstance(first, list) and len(lines) > 1)


def line_chunks(blocks: Iterable[bytes], source: str) -> Iterator[Chunk]:
    """Chunks of a file with an entry per line."""
    line, pending, skipping = 1, bytearray(), False
    for block in blocks:
        if skipping:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, skipping, line = block[end + 1 :], False, line + 1
        cut = block.rfind(b"\n") + 1
        if cut:
            pending += block[:cut]
            yield Lines(source, line, bytes(pending))
            line += pending.count(b"\n")
            pending = bytearray(block[cut:])
        else:
            pending += block
        if len(pending) > MAX_ENTRY:
            yield Entries(source, [(line, _too_long())])
            pending, skipping = bytearray(), True
    if pending:
        yield Lines(source, line, bytes(pending))
        line += 1
    if error := getattr(blocks, "error", None):
        yield _broken_off(source, line, error)


def value_chunks(blocks: Iterable[bytes], source: str) -> Iterator[Chunk]:
    """Chunks of a file that is a JSON array, or one JSON value after another."""
    splitter = Splitter(MAX_ENTRY)
    for block in blocks:
        yield from _values(source, splitter.feed(block))
    yield from _values(source, splitter.end())
    if error := getattr(blocks, "error", None):
        yield _broken_off(source, splitter.line, error)
    elif splitter.is_open and not splitter.was_cut:
        detail = "the file was cut off between two entries: fetch it again"
        yield Entries(source, [(splitter.line, InvalidRow("the array does not end", detail))])


def _values(source: str, texts: list[Text]) -> Iterator[Values]:
    """Chunks of about ``BLOCK`` bytes: behind a long broken entry many others may be found at once."""
    part: list[Text] = []
    size = 0
    for line, text in texts:
        part.append((line, text))
        size += len(text) if isinstance(text, bytes) else 0
        if size >= BLOCK:
            yield Values(source, part)
            part, size = [], 0
    if part:
        yield Values(source, part)


def _too_long() -> InvalidRow:
    return InvalidRow(
        f"longer than {MAX_ENTRY >> 20} MiB", "a quotation mark, bracket or line break is missing; look at this line"
    )


def _broken_off(source: str, line: int | None, error: Exception) -> Entries:
    place = "this line" if line else "the rows before"
    detail = f"{describe(error)}; what comes after {place} is missing: fetch the file again"
    return Entries(source, [(line, InvalidRow("the file breaks off", detail))])
