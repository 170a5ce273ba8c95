"""The small deterministic runs behind the reference curves, and the files that hold them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specforge_dspine import train
from specforge_dspine.curves import toy_target as curve_world
from specforge_dspine.curves.compare import Curve
from specforge_dspine.training.recipe import Recipe, apply_override, check_recipe
from specforge_dspine.training.run_logger import METRICS_FILE

DIGITS = 8  # significant, of every number in a reference: as many as float32 has
PARTS = re.compile(
    r"loss|(refined_)?(ce|l1|accuracy|tau)|align_\d+|lambda|beta|coverage|candidate_mass|rows|replaced_share|grad_norm"
)
EXACT = ("rows", "replaced_share")  # per micro-batch or set by draws alone: no measure of training


class CurvesError(RuntimeError):
    """A curve that cannot be compared or recorded; the message says what would work."""


@dataclass(frozen=True)
class Spec:
    """A curve to train: ``overrides`` of the common recipe, and the number of trainer processes."""

    name: str
    overrides: tuple[str, ...] = field(default=())
    ranks: int = 1


NO_ALIGNMENT = "dspine.alignment=off"
PLAIN = ("dspine.injection=off", "dspine.refinement=off", NO_ALIGNMENT)
# Seeds: ones at which rounding decides nothing that jumps (tests/curve_noise.py).
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
        Spec(
            "window",
            (
                "dspine.normalization_scope=window",
                "training.batch_size=2",
                "training.accumulation_steps=2",
                "training.seed=8",
            ),
        ),
        Spec("accumulated", ("training.batch_size=1", "training.accumulation_steps=4")),
        Spec("dflash", (*PLAIN, "dspine.causal=off", "dspine.ce_weight=1")),
    )
}


def document(name: str, world: Path, run_dir: Path) -> dict[str, Any]:
    """The recipe that all curves share: 12 steps of 4 sequences in each of 6 epochs."""
    return {
        "model": {"target_model_path": str(world / curve_world.TARGET), "torch_dtype": "float32"},
        "data": {
            "hidden_states_path": str(world / curve_world.FEATURES),
            "cache_dir": str(run_dir / "cache"),  # of this run alone: no table outlives a patched function
            "max_length": 64,
            "dataloader_num_workers": 0,
        },
        "dspine": {
            "num_hidden_layers": 3,
            "block_size": 6,
            "target_layer_ids": list(curve_world.TAPS),
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
        "run_id": name,
        "output_dir": str(run_dir),
    }


def recipe_of(spec: Spec, world: Path, run_dir: Path) -> Recipe:
    """The checked recipe of ``spec``.

    Raises:
        RecipeError: an option that this version does not have, or a wrong value.
    """
    recipe = document(spec.name, world, run_dir)
    for override in spec.overrides:
        apply_override(recipe, override)
    return check_recipe(recipe, world_size=spec.ranks)


def without_paths(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as it goes into a reference: the same on every machine."""
    resolved = recipe.resolved()
    resolved["model"]["target_model_path"] = curve_world.TARGET
    resolved["data"] |= {"hidden_states_path": curve_world.FEATURES, "cache_dir": "cache"}
    return resolved | {"output_dir": "run"}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums of one order: what makes two runs on one machine equal bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def world_in(workdir: Path) -> Path:
    """The world below ``workdir``, built where it is not there yet."""
    world = workdir / "world"
    if not world.exists():
        partial = workdir / f".world.{os.getpid()}"
        with one_thread():
            curve_world.build_world(partial)
        os.replace(partial, world)
    return world


def run_curve(spec: Spec, workdir: Path, world: Path | None = None) -> Curve:
    """Train ``spec`` in this process and return its curve; callable many times, nothing is kept in between.

    ``world`` (None: below ``workdir``, built if need be) may be shared by runs. The run's own folder below
    ``workdir`` is replaced; what the trainer prints goes to ``run.log`` there.

    Raises:
        RecipeError, RunError, FloatingPointError: as ``train.run``.
    """
    world = world or world_in(workdir)
    run_dir = workdir / spec.name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    recipe = recipe_of(spec, world, run_dir)
    with one_thread(), open(run_dir / "run.log", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        train.run(recipe, resume=False)
    return read_curve(spec.name, recipe)


def read_curve(name: str, recipe: Recipe) -> Curve:
    """The curve that a finished run left in its ``metrics.jsonl``."""
    text = (recipe.run_dir / METRICS_FILE).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    names = [part for part in lines[0] if PARTS.fullmatch(part)]
    parts = {part: [_number(line.get(part)) for line in lines] for part in names}
    return Curve(name, without_paths(recipe), parts)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
