"""JSON files that are either whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes ``path`` at once: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object per line, UTF-8."""
    write_text(path, "".join(to_line(row) for row in rows))


def to_line(row: Mapping[str, Any] | Sequence[Any]) -> str:
    """One JSONL line."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_jsonl(path: Path) -> list[Any]:
    """Every line of a file that :func:`write_jsonl` made.

    Raises:
        ValueError: a line that is not JSON, by its number.
    """
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    return rows


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
