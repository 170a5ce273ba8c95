"""Files and folders that are either whole or absent; JSON; lines of JSON; hashes of content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from specforge_dspine.utils.errors import InvalidFileError

ABSENT = "absent"  # of a value, in ``differences``


@contextlib.contextmanager
def atomic_write(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` when the context ends without an error.

    ``sync`` waits until the disk has it, so that a power cut loses nothing either.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that replaces ``path`` when the context ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically, indented."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InvalidFileError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidFileError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def as_json(value: Any) -> Any:
    """``value`` as a JSON file would give it back: tuples become lists."""
    return json.loads(json.dumps(value))


def differences(then: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs, as (dotted name, value then, value now); a missing value is ``ABSENT``."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            yield from differences(then.get(key, ABSENT), now.get(key, ABSENT), f"{name}.{key}" if name else key)
    elif then != now:
        yield name, then, now


def to_line(value: Any) -> bytes:
    """One line of JSON."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def read_jsonl(path: Path) -> list[Any]:
    """The values of a file with one JSON value per line."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_fingerprint(model_path: Path) -> str:
    """SHA-256 over a model directory's config and, per weight file, its name, size and 16 sampled blocks.

    Training changes weights everywhere, so samples tell checkpoints apart without reading them whole.
    """
    digest = hashlib.sha256()
    weights = sorted(model_path.glob("*.safetensors")) or sorted(model_path.glob("pytorch_model*.bin"))
    for path in [model_path / "config.json", *weights]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for k in range(16):
                file.seek(size * k // 16)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def looked_in(path: Path | str) -> str:
    """Say which place a relative ``path`` means; empty for an absolute one."""
    if Path(path).is_absolute():
        return ""
    return f" (looked in {Path(path).absolute()}: relative paths start at the current folder)"


def check_model_path(path: str) -> str:
    """Return a model's folder, or its name on the hub; a ValueError where it can only be a missing folder."""
    first, *rest = Path(path).parts or (path,)
    is_local = path.startswith(("/", ".", "~")) or len(rest) > 1 or (rest and Path(first).is_dir())
    if is_local and not Path(path).exists():
        raise ValueError(
            f"no such folder{looked_in(path)}; give one that holds a model, or a model's name on the hub"
        )
    return path


def printable(path: Path | str) -> str:
    """A path as text; bytes that are not UTF-8 are escaped, for JSON and terminals cannot hold them."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
