"""Files that are either whole or not there, and lines of JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from specforge_dspine.utils.errors import CheckpointError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` at the end: a reader sees the old one or the new one.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        scratch.unlink(missing_ok=True)


def printable(path: Path | str) -> str:
    """A path as text; bytes of it that are not UTF-8 are written out, for neither JSON nor UTF-8 can hold them."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def to_line(row: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """One JSONL line."""
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def read_jsonl(path: Path) -> list[Any]:
    """The values of a JSONL file that was written here, all at once."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(partial, path)
