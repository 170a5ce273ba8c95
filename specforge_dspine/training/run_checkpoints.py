"""Checkpoints of a run: which are complete, so that the run can continue from them and be exported.

    {run_id}-stepN/training_state.pt           shared: draft, counters, contract, replicated optimizer (rank 0)
    {run_id}-stepN/training_state_rank{r}.pt   of rank r < world_size: RNGs, sharded optimizer

SpecForge writes each file beside its place and renames it, in no order between ranks, then points ``-latest`` at the
folder and deletes older ones file by file. A kill in between leaves folders that lack files. A failing disk leaves
wrong bytes that ``torch.load`` does not notice, because it checks no CRC. So a link or a file's presence is not
enough: a folder is complete if every rank's file is there and every CRC holds.
"""

from __future__ import annotations

import logging
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from specforge.training.checkpoint import STATE_FILE

from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import read_json

logger = logging.getLogger(__name__)

MARKED_AS_FOLDER = 0x10  # MS-DOS attribute of a record in a zip archive


class CheckpointFolder(NamedTuple):
    """A folder that is named as a checkpoint, whatever it holds."""

    run_id: str
    step: int
    path: Path


def checkpoint_folders(run_dir: Path) -> list[CheckpointFolder]:
    """Return the checkpoint folders of ``run_dir``, of any run id, the newest step last."""
    found = []
    for path in run_dir.glob("*-step*"):
        name = re.fullmatch(r"(.+)-step(\d+)", path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append(CheckpointFolder(name[1], int(name[2]), path))
    return sorted(found, key=lambda folder: folder.step)


def read_state(folder: Path, file: str = STATE_FILE) -> dict[str, Any]:
    """Read one file of a checkpoint; its tensors stay on the disk until they are used."""
    content: dict[str, Any] = torch.load(folder / file, map_location="cpu", weights_only=False, mmap=True)
    return content


def checkpoint_step(path: str | None) -> int:
    """Return the optimizer steps of a checkpoint folder; 0 without one."""
    return 0 if path is None else int(read_state(Path(path))["global_step"])


def file_problem(path: Path) -> str | None:
    """Describe what is wrong with one file of a checkpoint; None if every byte is as it was written."""
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
            read_state(path.parent, path.name)  # the two readers look at different bytes of the archive's directory
    except Exception as error:  # a wrong byte there can raise anything
        return f"{path.name} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
    return None if record is None else f"{path.name} is damaged (record {record})"


def checkpoint_problem(folder: CheckpointFolder) -> str | None:
    """Describe what is wrong with a checkpoint; None if it is complete."""
    if problem := file_problem(folder.path / STATE_FILE):
        return problem
    state = read_state(folder.path)
    if lacking := {"draft_state_dict", "global_step", "world_size"} - state.keys():
        return f"{STATE_FILE} is no training state (no {', '.join(sorted(lacking))})"
    if state["global_step"] != folder.step:
        return f"{STATE_FILE} is of step {state['global_step']}"
    ranks = (file_problem(folder.path / f"training_state_rank{rank}.pt") for rank in range(state["world_size"]))
    return next((problem for problem in ranks if problem), None)


def newest_complete(run_dir: Path, run_id: str) -> Path | None:
    """Find the newest complete checkpoint of ``run_id`` in ``run_dir``; None if there is no checkpoint at all.

    Logs what is wrong with every newer one. Reads every byte of the one it returns.

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
        problem = checkpoint_problem(folder)
        if problem is None:
            for name, why in rejected.items():
                logger.warning("checkpoint %s cannot be used: %s; %s is used instead", name, why, folder.path.name)
            return folder.path
        rejected[folder.path.name] = problem
    if not rejected:
        return None
    problems = ", ".join(f"{name}: {why}" for name, why in rejected.items())
    raise RecipeError(
        f"output_dir={str(run_dir)!r} holds no complete checkpoint ({problems}); remove {', '.join(rejected)} to "
        "start again from the first step, or start in another output_dir"
    )


def marked_best(run_dir: Path, run_id: str) -> Path | None:
    """Find the complete checkpoint that SpecForge marked as the best on held-out samples; None without one."""
    meta_path = run_dir / f"{run_id}.best_meta.json"
    if not meta_path.exists():
        return None
    step = read_json(meta_path)["step"]
    folder = CheckpointFolder(run_id, step, run_dir.absolute() / f"{run_id}-step{step}")
    if problem := checkpoint_problem(folder):
        logger.warning("the best checkpoint, %s, cannot be used: %s", folder.path.name, problem)
        return None
    return folder.path


def remove_unusable_checkpoints(run_dir: Path, run_id: str, step: int) -> None:
    """Remove checkpoints that a run continuing from ``step`` cannot use.

    Later ones were rejected, and SpecForge would count them among the checkpoints to keep. Of some a kill cut the
    deletion short, and SpecForge would never delete them.
    """
    for folder in checkpoint_folders(run_dir):
        if folder.run_id == run_id and (folder.step > step or not (folder.path / STATE_FILE).exists()):
            shutil.rmtree(folder.path)
