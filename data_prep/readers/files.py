"""Files of chat data as chunks of entries, whatever state the files are in.

A chunk is about a mebibyte of a file. Here only its entries' places are found; a worker parses them. What cannot be
read is an invalid row with its line in place of an entry.
"""

from __future__ import annotations

import errno
import gzip
from collections.abc import Generator, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import zstandard

from data_prep.readers.chunks import Chunk, Entries, Lines, Table, parse
from data_prep.readers.json_array import EntryReader
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import printable

BLOCK = 1 << 20  # bytes that are read at a time; a chunk holds about as many
ZSTD_BLOCK = 256  # bytes unpacked at once: four may stand for 128 KiB, and the library has no bound of its own
TABLE_ROWS = 1024  # rows of a table in a chunk
MAX_ENTRY = 64 << 20  # bytes of one entry; beyond, a quotation mark or bracket is missing
PEEKED_LINES = 3  # by which a file of one entry per line is told from one long JSON value
LINE_SUFFIXES, TABLE_SUFFIX, PACKED_SUFFIXES = (".jsonl", ".ndjson"), ".parquet", (".gz", ".zst")
SUFFIXES = (".json", *LINE_SUFFIXES, TABLE_SUFFIX)
UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # errors of the machine, not of the file that meets them


def file_chunks(path: Path) -> Iterator[Chunk]:
    """All of a file, chunk by chunk; what cannot be read is in it as invalid rows."""
    source = printable(path)
    chunks = _table_chunks(path, source) if path.suffix == TABLE_SUFFIX else _text_chunks(path, source)
    return errors_as_rows(source, chunks)


def errors_as_rows(source: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks, and an invalid row in place of those that an error of the file, not of the machine, stops."""
    has_any = False
    try:
        for chunk in chunks:
            yield chunk
            has_any = True
    except MemoryError:
        raise
    except Exception as error:  # libraries raise what they like, and one file must not end the job
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            advice = "raise the limit (ulimit -n), or leave --interleave out; the same command continues"
            raise OSError(error.errno, f"{error.strerror}: {advice}", source) from error
        yield _broken_off(source, None, error) if has_any else unreadable_file(source, error)


def unreadable_file(source: str, error: Exception) -> Entries:
    """A file of which nothing can be read, as one invalid row."""
    advice = "make it readable" if isinstance(error, PermissionError) else "repair the file"
    return _invalid(source, None, "the file cannot be read", f"{describe(error)}; {advice} and run again")


def describe(error: Exception) -> str:
    """An error in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _broken_off(source: str, line: int | None, error: Exception) -> Entries:
    place = "this line" if line else "the rows before"
    detail = f"{describe(error)}; what comes after {place} is missing: fetch the file again"
    return _invalid(source, line, "the file breaks off", detail)


def _invalid(source: str, line: int | None, reason: str, detail: str) -> Entries:
    return Entries(source, [(line, InvalidRow(reason, detail))])


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
                yield _invalid(source, row, "a part of the file cannot be read", detail)


def _text_chunks(path: Path, source: str) -> Iterator[Chunk]:
    errors: list[Exception] = []
    blocks = _until_error(filter(None, _unpacked(path)), errors)
    first = next(blocks, b"")
    if errors and not first:
        raise errors[0]
    if first.startswith(UTF16_MARKS):
        yield unreadable_file(source, ValueError("it is UTF-16; save it as UTF-8"))
        return
    start = len(UTF8_MARK) if first.startswith(UTF8_MARK) else 0
    blocks = chain([first[start:]], blocks)
    if _holds_lines(first[start:], path):
        line = yield from _line_chunks(blocks, source)
    else:
        line = yield from _array_chunks(blocks, source, start, errors)
    if errors:
        yield _broken_off(source, line, errors[0])


def _until_error(blocks: Iterator[bytes], errors: list[Exception]) -> Iterator[bytes]:
    """The blocks up to an error, which goes to ``errors``."""
    try:
        yield from blocks
    except MemoryError:
        raise
    except Exception as error:
        errors.append(error)


def _unpacked(path: Path) -> Iterator[bytes]:
    """The file's bytes, about ``BLOCK`` of them at a time, however well they were packed."""
    block = bytearray()
    try:
        for part in _parts(path):
            block += part
            while len(block) >= BLOCK:
                yield bytes(block[:BLOCK])
                del block[:BLOCK]
    except Exception:
        yield bytes(block)
        raise
    yield bytes(block)


def _parts(path: Path) -> Iterator[bytes]:
    if path.suffix == ".gz":
        with gzip.open(path) as unpacked:
            yield from iter(lambda: unpacked.read1(BLOCK), b"")
        return
    with path.open("rb") as file:
        if path.suffix == ".zst":
            yield from _unzstd(file)
        else:
            yield from iter(lambda: file.read(BLOCK), b"")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    unpacker = None
    for data in iter(lambda: file.read(ZSTD_BLOCK), b""):
        while data:
            unpacker = unpacker or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            yield unpacker.decompress(data)
            if not unpacker.eof:
                break
            data, unpacker = unpacker.unused_data, None
    if unpacker is not None:
        raise EOFError("the compressed data end too early")


def _holds_lines(head: bytes, path: Path) -> bool:
    """Whether a file that begins with ``head`` has an entry per line, rather than one array or long values."""
    if any(suffix in LINE_SUFFIXES for suffix in path.suffixes):
        return True
    lines = [line for line in head.split(b"\n", PEEKED_LINES)[:PEEKED_LINES] if line.strip()]
    kinds = [type(parse(line)) for line in lines]
    if kinds[1:] == [dict] * (PEEKED_LINES - 1):
        return True  # whatever is wrong with the first
    return bool(kinds) and (kinds[0] is dict or (kinds[0] is list and len(kinds) > 1))


def _line_chunks(blocks: Iterator[bytes], source: str) -> Generator[Chunk, None, int]:
    """Chunks of a file with an entry per line; returns the line after them."""
    line, pending, skipping = 1, b"", False
    for block in blocks:
        if skipping:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, skipping, line = block[end + 1 :], False, line + 1
        cut = block.rfind(b"\n") + 1
        if cut:
            yield Lines(source, line, pending + block[:cut])
            line += block.count(b"\n")
            pending = block[cut:]
        else:
            pending += block
        if len(pending) > MAX_ENTRY:
            detail = "a quotation mark, bracket or line break is missing; look at this line"
            yield _invalid(source, line, f"longer than {MAX_ENTRY >> 20} MiB", detail)
            pending, skipping = b"", True
    if pending:
        yield Lines(source, line, pending)
        line += 1
    return line


def _array_chunks(
    blocks: Iterator[bytes], source: str, offset: int, errors: list[Exception]
) -> Generator[Chunk, None, int]:
    """The same of a file that is a JSON array, or one JSON value after another."""
    reader = EntryReader(MAX_ENTRY, offset)
    for block in blocks:
        if entries := reader.feed(block):
            yield Entries(source, entries)
        if reader.has_failed:
            return reader.line
    if not errors and (entries := reader.end()):
        yield Entries(source, entries)
    return reader.line
