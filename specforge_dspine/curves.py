"""Training curves as a net: small deterministic runs of the real trainer, recorded once and compared ever after.

    python -m specforge_dspine.curves record|check|plot [--only NAME ..] [--dir tests/curves] [--out DIR]

Each curve trains a small draft on the world of ``curve_world``, from offline features, past the end of the warm-up
and of the curriculum. ``record`` writes references into ``--dir``; ``check`` trains again, compares, names the part
and the step at which a deviation starts, and draws both curves into ``--out``; it also holds the runs that are equal
by construction against each other (``curve_groups``). ``plot`` draws the references. Exit status: 0; 1 where
something deviates; 2 where something is missing or cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specforge_dspine import curve_world, train
from specforge_dspine.curve_compare import TOLERANCES, Curve, Deviation, compare, draw
from specforge_dspine.metrics import METRICS_FILE
from specforge_dspine.recipe import Recipe, RecipeError, apply_override, check_recipe
from specforge_dspine.version import VERSION

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
        RecipeError, RunFailed, FloatingPointError: as ``train.run``.
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


def save_reference(curve: Curve, folder: Path) -> Path:
    """Write ``NAME.json``, one line per part, atomically; returns its path."""
    head = {
        "name": curve.name,
        "recipe": curve.recipe,
        "versions": versions(),
        "seed": curve.recipe["training"]["seed"],
        "world_seed": curve_world.SEED,
        "steps": curve.steps,
        "tolerances": {pattern.pattern: tolerance._asdict() for pattern, tolerance in TOLERANCES},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts = [
        f"    {json.dumps(part)}: {json.dumps([float(f'{value:.{DIGITS}g}') for value in values])}"
        for part, values in curve.parts.items()
    ]
    lines.append('  "parts": {\n' + ",\n".join(parts) + "\n  }")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{curve.name}.json"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def load_reference(name: str, folder: Path) -> Curve:
    """The recorded curve ``name``.

    Raises:
        CurvesError: there is none, or it cannot be read.
    """
    path = folder / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Curve(content["name"], content["recipe"], content["parts"])
    except FileNotFoundError:
        raise CurvesError(
            f"{path}: no reference; record it with python -m specforge_dspine.curves record --only {name}"
        ) from None
    except (ValueError, KeyError) as error:
        raise CurvesError(f"{path} is no reference ({error!r}); record it again, or restore it") from error


def versions() -> dict[str, str]:
    """What produced a curve."""
    return {name: version(name) for name in ("torch", "specforge", "transformers")} | {"specforge_dspine": VERSION}


def changed_options(reference: dict[str, Any], ours: dict[str, Any], path: str = "") -> list[str]:
    """Options of the reference's recipe that are different now: often the cause of a deviation. Options that the
    reference does not know are newer than it."""
    found = []
    for key, before in reference.items():
        now = ours.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            found += changed_options(before, now, f"{path}{key}.")
        elif before != now:
            found.append(f"{path}{key}: recorded with {before!r}, now {now!r}")
    return found


def check_curve(name: str, references: Path, workdir: Path, out: Path) -> list[Deviation]:
    """Train curve ``name`` again, print how it compares, and draw it into ``out`` if it deviates.

    Raises:
        CurvesError: no reference; RecipeError and so on as ``run_curve``.
    """
    reference = load_reference(name, references)
    curve = run_curve(CURVES[name], workdir)
    deviations = compare(reference, curve)
    if not deviations:
        print(f"ok   {name}: {curve.steps} steps, {len(reference.parts)} parts")
        return []
    print(f"OFF  {name}: {len(deviations)} deviations")
    for line in [*map(str, deviations), *changed_options(reference.recipe, curve.recipe)]:
        print(f"       {line}")
    out.mkdir(parents=True, exist_ok=True)
    draw(out / f"{name}.png", reference, curve, deviations)
    print(f"       drawn: {out / name}.png")
    return deviations


def check(names: list[str], references: Path, out: Path, *, groups: bool) -> int:
    """``check`` of the command line; returns the number of curves and groups that are off.

    Raises:
        CurvesError: no reference, or a group's run that failed; RecipeError and so on as ``run_curve``.
    """
    from specforge_dspine.curve_groups import GROUPS, check_group  # it builds on this module

    off = 0
    with tempfile.TemporaryDirectory(prefix="dspine-curves-") as folder:
        for name in names:
            off += bool(check_curve(name, references, Path(folder), out))
        for group in GROUPS.values() if groups else ():
            off += bool(check_group(group, Path(folder)))
    return off


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("record", "check", "plot"))
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(CURVES), help="these curves, no groups")
    parser.add_argument("--dir", type=Path, default=Path("tests/curves"), help="references (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/curves"), help="pictures (default: %(default)s)")
    args = parser.parse_args(argv)
    names = args.only or list(CURVES)
    try:
        if args.action == "check":
            return 1 if check(names, args.dir, args.out, groups=args.only is None) else 0
        with tempfile.TemporaryDirectory(prefix="dspine-curves-") as folder:
            for name in names:
                if args.action == "record":
                    print(f"recorded {save_reference(run_curve(CURVES[name], Path(folder)), args.dir)}")
                else:
                    args.out.mkdir(parents=True, exist_ok=True)
                    draw(args.out / f"{name}.png", load_reference(name, args.dir))
                    print(f"drawn {args.out / name}.png")
    except (CurvesError, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
