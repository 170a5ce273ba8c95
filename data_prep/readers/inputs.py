"""Inputs of a command: files, folders, packages, data sets; each as chunks of rows and what identifies it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.readers import files
from data_prep.readers.chunks import Chunk, Table
from data_prep.readers.packages import PACKAGES
from specforge_dspine.utils.benchmark_entries import SIDE_SUFFIXES, BenchmarkError, load_hub
from specforge_dspine.utils.files import file_sha256, printable

KINDS = f"{', '.join(files.SUFFIXES)} (all but the last also with {' or '.join(files.PACKED_SUFFIXES)})"
SAVED_MARKS = ("dataset_dict.json", "state.json")  # of datasets' save_to_disk


@dataclass(frozen=True)
class Input:
    """One source of rows."""

    name: str  # as messages call it
    identity: str  # what decides the rows; part of what an output is made from
    chunks: Callable[[], Iterator[Chunk]]  # from the beginning, each time it is called
    endless: bool = False  # whether a limit is needed


@dataclass(frozen=True)
class Inputs:
    """All of ``--input`` in order, and what is not read in its folders, each with the reason."""

    found: list[Input]
    ignored: list[str]

    @property
    def identities(self) -> dict[str, str]:
        """Identities by number and name: in another order, or twice, inputs give other rows."""
        return {f"{number} {each.name}": each.identity for number, each in enumerate(self.found, 1)}


def open_inputs(names: Sequence[str], *, limited: bool = True, option: str = "--input") -> Inputs:
    """Everything that ``names`` stand for, in their order; a folder's files by name.

    A ValueError names ``option``, and what stands for nothing, is of no known kind, or is endless where ``limited``
    is False.
    """
    result = Inputs([], [])
    for name in names:
        path, (package_name, _, setting) = Path(name), name.partition(":")
        package = PACKAGES.get(package_name)
        if os.path.isdir(path):
            _add_folder(path, result)
        elif os.path.exists(path):
            if not os.path.isfile(path):
                raise ValueError(f"{option} {name}: not an ordinary file; put the data into one")
            if not _is_data(path):
                raise ValueError(f"{option} {name}: use {KINDS}")
            result.found.append(_file(path))
        elif package is not None:
            package.chunks(setting)  # refuses a bad one at once
            chunks = partial(package.chunks, setting)
            result.found.append(Input(name, package.identity(name), chunks, package.endless))
        elif _is_data(path) or path.is_absolute():
            raise ValueError(f"{option} {name}: there is no such file")
        else:
            try:
                result.found.append(_table(name, load_hub(name)))
            except BenchmarkError as error:
                raise ValueError(
                    f"{option} {name}: neither a file or folder here, nor {', '.join(PACKAGES)}, nor a data set that "
                    f"datasets can load as NAME[@CONFIG][:SPLIT] ({error})"
                ) from error
    endless = [each.name for each in result.found if each.endless]
    if endless and not limited:
        raise ValueError(f"{option} {endless[0]} has no end: say with --limit how many rows to take")
    if not result.found:
        raise ValueError(f"{option} {' '.join(names)}: no file of a known kind in it; use {KINDS}")
    return result


def rows_of(inputs: Inputs) -> Iterator[tuple[str, int | None, Any]]:
    """Every row with its source and line, parsed here: for small inputs."""
    for each in inputs.found:
        for chunk in each.chunks():
            for line, entry in chunk.rows():
                yield chunk.source, line, entry


def _is_data(path: Path) -> bool:
    """Whether the name is one of a file that can be read."""
    suffixes = path.suffixes[:-1] if path.suffix in files.PACKED_SUFFIXES else path.suffixes
    return bool(suffixes) and suffixes[-1] in files.SUFFIXES


def _file(path: Path) -> Input:
    try:
        identity = f"sha256 {file_sha256(path)}"
    except OSError as error:
        identity = files.describe(error)  # the rows will say so
    return Input(printable(path), identity, partial(files.file_chunks, path))


def _add_folder(folder: Path, result: Inputs) -> None:
    if any((folder / mark).is_file() for mark in SAVED_MARKS):
        from datasets import Dataset, load_from_disk

        saved = load_from_disk(str(folder))
        splits = {"": saved} if isinstance(saved, Dataset) else {f":{name}": table for name, table in saved.items()}
        result.found.extend(_table(f"{printable(folder)}{split}", table) for split, table in splits.items())
        return
    closed: list[OSError] = []
    data, ignored = _walk(folder, closed)
    result.ignored.extend(f"{printable(path)} ({why})" for path, why in sorted(ignored))
    bar = tqdm(sorted(data), desc=f"looking at {printable(folder)}", unit=" files", leave=False, disable=None)
    result.found.extend(_file(path) for path in bar)
    for error in closed:
        rows = files.unreadable_file(printable(error.filename), error)
        result.found.append(Input(rows.source, files.describe(error), partial(iter, [rows])))


def _walk(folder: Path, closed: list[OSError]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The data files below ``folder``, through links too, and what else is there, with the reason."""
    data: list[Path] = []
    ignored: list[tuple[Path, str]] = []
    walked = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, onerror=closed.append, followlinks=True):
        entered = []
        for name in sorted(folders):
            path = Path(parent, name)
            if name.startswith("."):
                ignored.append((path, "hidden"))
            elif os.path.realpath(path) in walked:
                ignored.append((path, "a link to a folder that is read already"))
            else:
                walked.add(os.path.realpath(path))
                entered.append(name)
        folders[:] = entered
        for name in names:
            path = Path(parent, name)
            if name.startswith("."):
                ignored.append((path, "hidden"))
            elif not _is_data(path) or name.endswith(SIDE_SUFFIXES):
                ignored.append((path, "of no known kind"))
            elif os.path.exists(path) and not os.path.isfile(path):
                ignored.append((path, "not an ordinary file"))
            else:
                data.append(path)  # a broken link too: its row says that it cannot be read
    return data, ignored


def _table(name: str, table: Any) -> Input:
    def chunks() -> Iterator[Chunk]:
        row = 1
        for part in table.with_format("arrow").iter(files.TABLE_ROWS):
            yield Table(name, row, part)
            row += len(part)

    return Input(name, f"datasets {table._fingerprint}", lambda: files.errors_as_rows(name, chunks()))
