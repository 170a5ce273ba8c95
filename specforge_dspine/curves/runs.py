"""Small deterministic training runs behind the reference curves."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specforge_dspine import train
from specforge_dspine.curves import toy_target
from specforge_dspine.curves.compare import Curve
from specforge_dspine.training.recipe import Recipe, apply_override, check_recipe
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.files import atomic_folder, read_jsonl

PARTS = re.compile(
    r"loss|(refined_)?(ce|l1|accuracy|tau)|align_\d+|lambda|beta|coverage|candidate_mass|rows|replaced_share|grad_norm"
)
EXACT = ("rows", "replaced_share")  # counted per micro-batch, or set by draws alone


class Spec(NamedTuple):
    """A curve to train: ``overrides`` of the common recipe, and the number of trainer processes."""

    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1


NO_ALIGNMENT = "dspine.alignment=off"
TWICE_2 = ("training.batch_size=2", "training.accumulation_steps=2")
PLAIN = ("dspine.injection=off", "dspine.refinement=off", NO_ALIGNMENT)
# Seeds at which rounding decides nothing that jumps (tests/support/curve_noise.py).
CURVES = {
    spec.name: spec
    for spec in (
        Spec("dspine", ("training.seed=16",)),
        Spec("no_injection", ("dspine.injection=off",)),
        Spec("no_refinement", ("dspine.refinement=off",)),
        Spec("alignment_ce", ("dspine.alignment=ce",)),
        Spec("alignment_off", (NO_ALIGNMENT,)),
        Spec("curriculum_off", ("dspine.curriculum=off",)),
        Spec("shared", ("dspine.normalization=shared", "training.seed=8")),
        Spec("window", ("dspine.normalization_scope=window", *TWICE_2, "training.seed=8")),
        Spec("accumulated", ("training.batch_size=1", "training.accumulation_steps=4")),
        Spec("dflash", (*PLAIN, "dspine.causal=off", "dspine.ce_weight=1")),
    )
}


def recipe_of(spec: Spec, toy_data: Path, run_dir: Path) -> Recipe:
    """The checked recipe of ``spec``: 12 steps of 4 sequences in each of 6 epochs, and its overrides."""
    document: dict[str, Any] = {
        "model": {"target_model_path": str(toy_data / toy_target.TARGET), "torch_dtype": "float32"},
        "data": {
            "hidden_states_path": str(toy_data / toy_target.FEATURES),
            "cache_dir": str(run_dir / "cache"),  # of this run alone: no table outlives a patched function
            "max_length": 64,
            "dataloader_num_workers": 0,
        },
        "dspine": {
            "num_hidden_layers": 3,
            "block_size": 6,
            "target_layer_ids": list(toy_target.TAPS),
            "transfer_rank": 16,
            "message_size": 8,
            "top_k": 8,
            "replacement_layers": 2,
        },
        "training": {
            "num_epochs": 6,
            "batch_size": 4,
            "num_anchors": 6,
            "loss_decay_gamma": 7.0,
            "objective_chunk_blocks": 4,
            "learning_rate": 6e-3,
            "warmup_ratio": 0.1,
            "fsdp_sharding": "NO_SHARD",
            "attention_backend": "sdpa",
            "log_interval": 1,
            "seed": 7,
        },
        "tracking": {"report_to": "none"},
        "run_id": spec.name,
        "output_dir": str(run_dir),
    }
    for override in spec.overrides:
        apply_override(document, override)
    return check_recipe(document, world_size=spec.ranks)


def without_paths(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe for a reference: the same on every machine."""
    resolved = recipe.resolved()
    resolved["model"]["target_model_path"] = toy_target.TARGET
    resolved["data"] |= {"hidden_states_path": toy_target.FEATURES, "cache_dir": "cache"}
    return resolved | {"output_dir": "run"}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums have one order and two runs on a machine are equal bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def toy_data_in(workdir: Path) -> Path:
    """The toy data below ``workdir``, made on first use."""
    folder = workdir / "toy_data"
    if not folder.exists():
        with one_thread(), atomic_folder(folder) as partial:
            toy_target.build_toy_data(partial)
    return folder


def run_curve(spec: Spec, workdir: Path, toy_data: Path | None = None) -> Curve:
    """Train ``spec`` in this process and return its curve; nothing is kept between calls.

    Args:
        workdir: holds the run's folder, which is replaced, with the trainer's output in ``run.log``.
        toy_data: default: below ``workdir``. Runs may share it.

    Raises:
        RecipeError, RunError, FloatingPointError: as ``train.run``.
    """
    run_dir = workdir / spec.name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    recipe = recipe_of(spec, toy_data or toy_data_in(workdir), run_dir)
    with (
        one_thread(),
        open(run_dir / "run.log", "w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        train.run(recipe, resume=False)
    return read_curve(spec.name, recipe)


def read_curve(name: str, recipe: Recipe) -> Curve:
    """The curve in the ``metrics.jsonl`` of a finished run."""
    lines = read_jsonl(recipe.run_dir / METRICS_FILE)

    def value(line: dict[str, float | None], part: str) -> float:
        logged = line.get(part)
        return math.nan if logged is None else logged

    parts = {part: [value(line, part) for line in lines] for part in lines[0] if PARTS.fullmatch(part)}
    return Curve(name, without_paths(recipe), parts)
