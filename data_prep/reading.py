"""Reads files of chat data as chunks of entries, whatever state the files are in.

A chunk is about a mebibyte of a file. Here it is only found where entries begin and end; a worker parses them. What
cannot be read comes as an odd row in place of an entry, with its line, and does not keep the rest from being read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from data_prep.entries import Chunk, Entries, Lines, OddEntry, Table, Values, parse
from data_prep.splitting import Splitter

BLOCK = 1 << 20
"""Bytes that are read at a time; a chunk holds about as many."""

PACKED_BLOCK = 1 << 16
"""The same of a compressed file: its content may be many times larger."""

MAX_ENTRY = 64 << 20
"""Bytes of one entry; beyond, a quotation mark or bracket is missing."""

PEEKED_LINES = 20
"""Lines by which a file of one entry per line is told from one long JSON value."""

LINE_SUFFIXES, TABLE_SUFFIX = (".jsonl", ".ndjson"), ".parquet"
PACKED_SUFFIXES = (".gz", ".zst")
SUFFIXES = (".json", *LINE_SUFFIXES, TABLE_SUFFIX)

UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


def odd_file(source: str, error: Exception) -> Entries:
    """A file of which nothing can be read, as one odd row."""
    advice = "make it readable" if isinstance(error, PermissionError) else "repair the file"
    return Entries(
        source, [(None, OddEntry("the file cannot be read", f"{describe(error)}; {advice} and run again"))]
    )


def describe(error: Exception) -> str:
    """An error in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def file_chunks(path: Path) -> Iterator[Chunk]:
    """All of a file, chunk by chunk; what cannot be read is in it as odd rows."""
    source = str(path)
    try:
        if path.suffix == TABLE_SUFFIX:
            yield from _table_chunks(path, source)
        else:
            yield from _text_chunks(path, source)
    except (OSError, ImportError) as error:
        yield odd_file(source, error)


def _table_chunks(path: Path, source: str) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    row = 1
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield Table(source, row, batch)
                row += len(batch)
    except pa.ArrowException as error:
        if row == 1:
            yield odd_file(source, error)
        else:
            yield _broken_off(source, row, error)


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
            return next(self._raw, b"")
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            self.error = error
            return b""


def _unpacked(path: Path) -> Iterator[bytes]:
    unpackers: dict[str, Callable[[], Any]] = {
        ".gz": lambda: zlib.decompressobj(31),
        ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
    }
    new = unpackers.get(path.suffix)
    with path.open("rb") as file:
        if new is None:
            yield from iter(lambda: file.read(BLOCK), b"")
            return
        unpacker = None
        for data in iter(lambda: file.read(PACKED_BLOCK), b""):
            while data.strip(b"\0") or (data and unpacker is not None):  # zeros may follow the last member
                unpacker = unpacker or new()
                if part := unpacker.decompress(data):
                    yield part
                if not unpacker.eof:
                    break
                data, unpacker = unpacker.unused_data, None
        if unpacker is not None:  # neither library says so by itself
            raise EOFError("the compressed data end too early")


def holds_lines(head: bytes, path: Path) -> bool:
    """Whether a file that begins with ``head`` has an entry per line, rather than one array or long values."""
    lines = [line for line in head.split(b"\n", PEEKED_LINES)[:PEEKED_LINES] if line.strip()]
    if not lines:
        return True
    if lines[0].lstrip().startswith(b"["):
        return len(lines) > 1 and isinstance(parse(lines[0]), list)
    named_so = any(suffix in LINE_SUFFIXES for suffix in path.suffixes)
    return named_so or len(lines) == 1 or any(isinstance(parse(line), dict) for line in lines)


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
    splitter = Splitter()
    for block in blocks:
        if texts := splitter.feed(block):
            yield Values(source, texts)
        if splitter.pending > MAX_ENTRY:
            yield Entries(source, [(splitter.line, _too_long())])
            return
    if last := splitter.end():
        yield Values(source, last)
    if error := getattr(blocks, "error", None):
        yield _broken_off(source, splitter.line, error)
    elif splitter.is_open and not last:
        detail = "the file was cut off between two entries: fetch it again"
        yield Entries(source, [(splitter.line, OddEntry("the array does not end", detail))])


def _too_long() -> OddEntry:
    return OddEntry(
        f"longer than {MAX_ENTRY >> 20} MiB", "a quotation mark, bracket or line break is missing; look at this line"
    )


def _broken_off(source: str, line: int, error: Exception) -> Entries:
    detail = f"{describe(error)}; what comes after this line is missing: fetch the file again"
    return Entries(source, [(line, OddEntry("the file breaks off", detail))])
