"""Small deterministic training runs: those behind the reference curves, and groups that are equal by construction.

References are JSON files, one line per part. Groups are compared with each other, which needs no reference:

    window   one optimizer window as 1 micro-batch of 8, 8 of 1, and 2 ranks × 4: §5's sums under the scope "window"
    chunks   the objective over all positions at once, one block at a time, and three
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specforge_dspine import train
from specforge_dspine.curves import toy_target
from specforge_dspine.curves.compare import TOLERANCES, Curve, Deviation, agree
from specforge_dspine.evaluation.provenance import version_facts
from specforge_dspine.training.recipe import Recipe, apply_override, check_recipe
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.errors import InvalidFileError
from specforge_dspine.utils.files import atomic_folder, atomic_write, read_json, read_jsonl
from specforge_dspine.utils.stages import Stages

PARTS = re.compile(
    r"loss|(refined_)?(ce|l1|accuracy|tau)|align_\d+|lambda|beta|coverage|candidate_mass|rows|replaced_share|grad_norm"
)
DIGITS = 8  # significant, of every number of a reference: as many as float32 has
ALLOWED = 1e-5  # relative, float32, within a group
TIMEOUT_S = 300.0  # of a run in several processes
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
SHORT = ("training.max_steps=18", "training.total_steps=36")  # past the warm-up, the curriculum and its end


def _split(name: str, batch: int, accumulation: int, ranks: int = 1) -> Spec:
    sizes = (f"training.batch_size={batch}", f"training.accumulation_steps={accumulation}")
    return Spec(name, (*SHORT, "dspine.normalization_scope=window", *sizes), ranks)


GROUPS = {  # every run must agree with the first
    "chunks": tuple(Spec(f"{n}_blocks", (*SHORT, f"training.objective_chunk_blocks={n}")) for n in (0, 1, 3)),
    "window": (_split("1x8", 8, 1), _split("8x1", 1, 8), _split("2_ranks_x4", 1, 4, ranks=2)),
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
    """Train ``spec`` in this process and return its curve; nothing is kept between calls. Raises as ``train.run``.

    The run's folder below ``workdir`` is replaced. Runs may share ``toy_data`` (default: below ``workdir``).
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
    parts = {
        part: [math.nan if line.get(part) is None else line[part] for line in lines]
        for part in lines[0]
        if PARTS.fullmatch(part)
    }
    resolved = recipe.resolved()  # without paths: the same on every machine
    resolved["model"]["target_model_path"] = toy_target.TARGET
    resolved["data"] |= {"hidden_states_path": toy_target.FEATURES, "cache_dir": "cache"}
    return Curve(name, resolved | {"output_dir": "run"}, parts)


def save_reference(curve: Curve, folder: Path) -> Path:
    """Write ``NAME.json``; returns its path."""
    head = {
        "name": curve.name,
        "recipe": curve.recipe,
        "versions": version_facts("torch", "specforge", "transformers"),
        "seed": curve.recipe["training"]["seed"],
        "toy_target_seed": toy_target.SEED,
        "steps": curve.steps,
        "tolerances": {pattern.pattern: tolerance._asdict() for pattern, tolerance in TOLERANCES},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts = [
        f"    {json.dumps(part)}: {json.dumps([float(f'{value:.{DIGITS}g}') for value in values])}"
        for part, values in curve.parts.items()
    ]
    lines.append('  "parts": {\n' + ",\n".join(parts) + "\n  }")
    path = folder / f"{curve.name}.json"
    with atomic_write(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path


def load_reference(name: str, folder: Path) -> Curve:
    """The recorded curve ``name``."""
    try:
        content = read_json(folder / f"{name}.json")
        return Curve(content["name"], content["recipe"], content["parts"])
    except (InvalidFileError, KeyError) as error:
        command = f"python -m specforge_dspine.curves record --only {name}"
        raise InvalidFileError(f"{error}; restore the reference, or record it with {command}") from error


def run_ranks(spec: Spec, workdir: Path, toy_data: Path) -> Curve:
    """As ``run_curve``, in ``spec.ranks`` processes; a StageError if they fail or do not end in time."""
    recipe = recipe_of(spec, toy_data, workdir / spec.name)
    path = workdir / f"{spec.name}.yaml"
    workdir.mkdir(parents=True, exist_ok=True)
    recipe.save(path)
    with Stages() as stages:
        timer = threading.Timer(TIMEOUT_S, stages.end)
        timer.start()
        try:
            stages.run(
                "torch.distributed.run",
                *("--standalone", "--nproc_per_node", spec.ranks),
                *("-m", "specforge_dspine.train", "--recipe", path),
                threads=1,
                log=workdir / f"{spec.name}.log",
            )
        finally:
            timer.cancel()
    return read_curve(spec.name, recipe)


def check_group(name: str, workdir: Path) -> list[Deviation]:
    """Train the runs of a group; returns what differs between them, except parts that count micro-batches."""
    toy_data, curves = toy_data_in(workdir), {}
    for spec in GROUPS[name]:
        curve = (run_curve if spec.ranks == 1 else run_ranks)(spec, workdir / name, toy_data)
        parts = {part: values for part, values in curve.parts.items() if part not in EXACT}
        curves[spec.name] = Curve(curve.name, curve.recipe, parts)
    return agree(curves, ALLOWED)
