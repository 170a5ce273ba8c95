"""Which checkpoint of a run is complete, so that the run can go on from it and be exported.

    {run_id}-stepN/training_state.pt           shared: draft, counters, contract, replicated optimizer (rank 0)
    {run_id}-stepN/training_state_rank{r}.pt   of rank r < world_size: RNGs, sharded optimizer

SpecForge writes each file beside its place and renames it, in no order between ranks, then points ``-latest`` at the
folder and deletes older ones file by file. A kill in between leaves folders that lack files, and a failing disk
leaves wrong bytes that ``torch.load`` does not notice: it checks no CRC. So neither the link nor a file's presence is
believed here. A folder is complete if every rank's file is there and every CRC holds.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from specforge.training.checkpoint import STATE_FILE

from specforge_dspine.utils.errors import RecipeError

MARKED_AS_FOLDER = 0x10  # MS-DOS attribute of a record in a zip archive


class Folder(NamedTuple):
    """A folder that is named as a checkpoint, whatever is in it."""

    run_id: str
    step: int
    path: Path


def checkpoint_folders(run_dir: Path) -> list[Folder]:
    """Every checkpoint folder of ``run_dir``, of whatever run, the newest step last."""
    found = []
    for path in run_dir.glob("*-step*"):
        name = re.fullmatch(r"(.+)-step(\d+)", path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append(Folder(name[1], int(name[2]), path))
    return sorted(found, key=lambda folder: folder.step)


def read(path: Path) -> dict[str, Any]:
    """One file of a checkpoint; its tensors stay on the disk until they are used."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return content


def read_state(folder: Path) -> dict[str, Any]:
    """The shared state of a complete checkpoint, read as ``read`` does."""
    return read(folder / STATE_FILE)


def checkpoint_step(path: str | None) -> int:
    """Optimizer steps of a checkpoint folder; 0 without one."""
    return 0 if path is None else int(read_state(Path(path))["global_step"])


def file_fault(path: Path) -> str | None:
    """What is wrong with one file of a checkpoint; None if every byte is as it was written."""
    if not path.is_file():
        return f"{path.name} is missing"
    try:
        if not zipfile.is_zipfile(path):
            return f"{path.name} is cut ({path.stat().st_size:,} bytes, and its end is missing)"
        with zipfile.ZipFile(path) as archive:
            # torch reads nothing from a record that is marked as a folder, and returns memory as it happens to be.
            marked = (info.filename for info in archive.infolist() if info.external_attr & MARKED_AS_FOLDER)
            record = next(marked, None) or archive.testzip()
        if record is None:
            read(path)  # the two readers look at different bytes of the archive's directory
    except Exception as error:  # a wrong byte there can raise anything
        return f"{path.name} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
    return None if record is None else f"{path.name} is damaged (record {record})"


def fault(folder: Folder) -> str | None:
    """What keeps a checkpoint from being used; None if it is complete."""
    if problem := file_fault(folder.path / STATE_FILE):
        return problem
    state = read_state(folder.path)
    if lacking := {"draft_state_dict", "global_step", "world_size"} - state.keys():
        return f"{STATE_FILE} is no training state (no {', '.join(sorted(lacking))})"
    if state["global_step"] != folder.step:
        return f"{STATE_FILE} is of step {state['global_step']}"
    ranks = (file_fault(folder.path / f"training_state_rank{rank}.pt") for rank in range(state["world_size"]))
    return next((problem for problem in ranks if problem), None)


def newest_complete(run_dir: Path, run_id: str) -> Path | None:
    """The newest complete checkpoint of ``run_id`` in ``run_dir``; None if there is no checkpoint at all.

    Says for every newer one what is wrong with it, and which one is used instead. Reads every byte of the one
    it returns.

    Raises:
        RecipeError: there are checkpoints, and none of them is complete, or all are of another run.
    """
    run_dir = run_dir.absolute()
    folders = checkpoint_folders(run_dir)
    ours = [folder for folder in folders if folder.run_id == run_id]
    if folders and not ours:
        others = " and ".join(sorted({repr(folder.run_id) for folder in folders}))
        raise RecipeError(f"run_id={run_id!r}: the checkpoints in {str(run_dir)!r} are of {others}; give that run_id")
    rejected: dict[str, str] = {}
    for folder in reversed(ours):
        problem = fault(folder)
        if problem is None:
            for name, why in rejected.items():
                print(f"checkpoint {name} cannot be used: {why}; {folder.path.name} is used instead", flush=True)
            return folder.path
        rejected[folder.path.name] = problem
    if not rejected:
        return None
    faults = ", ".join(f"{name}: {why}" for name, why in rejected.items())
    raise RecipeError(
        f"output_dir={str(run_dir)!r} holds no complete checkpoint ({faults}); remove {', '.join(rejected)} to start "
        "again from the first step, or start in another output_dir"
    )


def marked_best(run_dir: Path, run_id: str) -> Path | None:
    """The complete checkpoint that SpecForge marked as the best on held-out samples; None without such a mark.

    Says so if the marked one cannot be used.
    """
    try:
        meta = json.loads((run_dir / f"{run_id}.best_meta.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    folder = Folder(run_id, meta["step"], run_dir.absolute() / f"{run_id}-step{meta['step']}")
    if problem := fault(folder):
        print(f"the best checkpoint, {folder.path.name}, cannot be used: {problem}", flush=True)
        return None
    return folder.path


def sweep(run_dir: Path, run_id: str, step: int) -> None:
    """Remove what a run that goes on from ``step`` cannot use: later folders, which were rejected, and those whose
    deletion a kill cut short. SpecForge would count the first among the checkpoints to keep, and never delete the
    second."""
    for folder in checkpoint_folders(run_dir):
        if folder.run_id == run_id and (folder.step > step or not (folder.path / STATE_FILE).exists()):
            shutil.rmtree(folder.path)
