"""Variants of a recipe on the same data, seeds and budget, each trained and evaluated; and a report of it.

    python -m specforge_dspine.ablate --recipe recipes/smollm2_cpu_ablation.yaml --out runs/ablation
        [--variants full no-refinement NAME:key=value,..] [--seeds 1 2 3] [--at-once 2]
        --sets captured=runs/ablation/data/heldout mt-bench .. [--max-new-tokens N] [--limit N]

Every variant (specforge_dspine/variants.py; all by default) trains with every seed, and drafts greedily on the
``--sets`` of specforge_dspine.evaluate, by the commands that a user would give, ``--at-once`` of them at a time:

    OUT/VARIANT/seedN/run          the run, with its exports      OUT/VARIANT/seedN/train.log
    OUT/VARIANT/seedN/evaluation   what evaluate wrote            OUT/VARIANT/seedN/evaluate.log
    OUT/inputs.json                what all of them depend on

The same command continues: what is finished is left, a training that was stopped goes on from its checkpoint, an
evaluation from its last answer. More variants and seeds may be added; anything else that differs is refused by name.
At the end ``specforge_dspine.ablation_report`` makes the report, which can be made again at any time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.bench import processor
from specforge_dspine.checkpoints import checkpoint_folders, newest_complete
from specforge_dspine.contract import data_identity
from specforge_dspine.evaluate import open_sets
from specforge_dspine.fingerprint import model_fingerprint
from specforge_dspine.formats import CONFIG
from specforge_dspine.metrics import METRICS_FILE
from specforge_dspine.recipe import Recipe, RecipeError, load_recipe
from specforge_dspine.reference import read_json
from specforge_dspine.results import RESULT
from specforge_dspine.rundir import exclusive, write_json
from specforge_dspine.sets import SYNTAX
from specforge_dspine.signals import Interrupted, unwinding_signals
from specforge_dspine.stages import StageFailed, Stages, together
from specforge_dspine.variants import VARIANTS, Variant, parse_variants
from specforge_dspine.version import VERSION, installed

INPUTS, SPEED = "inputs.json", "speed.json"
FLAVOUR = "specforge"  # every variant has it, and it is the last that a run exports
OWN = {  # what a recipe says of a run alone, or of a place: not the ablation's inputs
    "": ("run_id", "output_dir"),
    "training": ("seed",),
    "data": ("hidden_states_path", "prompts_path", "cache_dir"),
    "model": ("target_model_path",),
}


class Place:
    """Where one run of an ablation is, and how far it has come."""

    def __init__(self, out: Path, variant: str, seed: int) -> None:
        self.variant, self.seed = variant, seed
        self.folder = out / variant / f"seed{seed}"
        self.run, self.evaluation = self.folder / "run", self.folder / "evaluation"
        self.draft = self.run / "export" / FLAVOUR

    @property
    def trained(self) -> bool:
        """An export appears whole, when the run has ended."""
        return (self.draft / CONFIG).is_file()

    @property
    def evaluated(self) -> bool:
        """The result is the last that an evaluation writes."""
        return (self.evaluation / RESULT).is_file()

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


class Progress:
    """Says what is done of how much, and how long the rest may take, from the parts that were seen to end."""

    def __init__(self, places: Sequence[Place], at_once: int) -> None:
        self.left = {"train": 0, "evaluate": 0}
        for place in places:
            self.left["train"] += not place.trained
            self.left["evaluate"] += not place.evaluated
        self.all, self.at_once = 2 * len(places), at_once
        self.seconds: dict[str, list[float]] = {kind: [] for kind in self.left}
        self._lock = threading.Lock()

    def done(self, kind: str, place: Place, seconds: float) -> None:
        """A part of this ``kind`` ended."""
        with self._lock:
            self.left[kind] -= 1
            self.seconds[kind].append(seconds)
            done = self.all - sum(self.left.values())
            print(f"\n[{done} of {self.all} done, {self.remaining()}] {place}: {kind} {seconds:.0f} s", flush=True)

    def remaining(self) -> str:
        """How long the rest may take."""
        if any(count and not self.seconds[kind] for kind, count in self.left.items()):
            return "time left unknown"
        means = {kind: sum(seen) / len(seen) for kind, seen in self.seconds.items() if seen}
        seconds = sum(means.get(kind, 0) * count for kind, count in self.left.items()) / self.at_once
        return f"about {seconds / 60:.0f} min left"


def inputs_of(recipe: Recipe, overridden: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of an ablation depend on: data, target and sets by content; ``overridden``: the ``dspine``
    section of each variant.

    Raises:
        ValueError: a set that cannot be read.
    """
    document = recipe.resolved()
    for section, keys in OWN.items():
        values = document[section] if section else document
        for key in keys:
            values.pop(key, None)
    del document["dspine"]  # every variant has its own
    return {
        "recipe": document,
        "variants": overridden,
        "data": data_identity(recipe.host),
        "target": model_fingerprint(Path(recipe.host.model.target_model_path)),
        "sets": {
            each.name: {"prompts": len(each.prompts), "sha256": each.sha256()}
            for each in open_sets(options.sets, options.limit)
        },
        "max_new_tokens": options.max_new_tokens,
        "versions": {name: installed(name) for name in ("torch", "transformers", "specforge")}
        | {"specforge_dspine": VERSION},
    }


def check_apart(overridden: dict[str, dict[str, Any]]) -> None:
    """Are the variants different trainings, and is the full one full?

    Raises:
        ValueError: two are the same, or the recipe itself is a variant.
    """
    seen: dict[str, str] = {}
    for name, section in overridden.items():
        twin = seen.setdefault(json.dumps(section, sort_keys=True), name)
        if twin != name:
            raise ValueError(
                f"variants {twin} and {name} are the same training with this recipe; give --variants without one of "
                "them, or a recipe whose dspine section leaves the method whole"
            )


def claim(out: Path, inputs: dict[str, Any]) -> None:
    """Make ``out`` this ablation's, or add the variants that are new to it.

    Raises:
        ValueError: it belongs to other inputs; all that differs is named.
    """
    path = out / INPUTS
    if path.exists():
        before = read_json(path)
        known = before["variants"]
        then = before | {"variants": {name: known[name] for name in inputs["variants"] if name in known}}
        now = inputs | {"variants": {name: inputs["variants"][name] for name in then["variants"]}}
        if differing := list(differences(then, now)):
            raise ValueError(
                f"{out} holds an ablation of other inputs ({'; '.join(differing)}); restore them, or use a new --out"
            )
        inputs = inputs | {"variants": known | inputs["variants"]}
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, inputs)


def differences(then: Any, now: Any, name: str = "") -> Iterable[str]:
    """What of two nested JSON values differs, by its dotted name."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            yield from differences(then.get(key, "absent"), now.get(key, "absent"), f"{name}.{key}" if name else key)
    elif then != now:
        yield f"{name} was {then} and is {now}"


def train(stages: Stages, recipe: Path, variant: Variant, place: Place, threads: int) -> None:
    """Train ``place``'s run to its end, or continue what a stopped command left of it.

    Raises:
        StageFailed: the training failed.
    """
    log = place.run / METRICS_FILE
    started = bool(checkpoint_folders(place.run)) or (log.exists() and log.stat().st_size > 0)
    run_id = f"{variant.name}-seed{place.seed}"
    if started:
        with exclusive(place.run):
            try:
                newest_complete(place.run, run_id)
            except RecipeError:  # the kill came while the first checkpoint was written
                shutil.rmtree(place.run)
                started = False
    stages.run(
        "specforge_dspine.train",
        *("--recipe", recipe, *variant.overrides, f"training.seed={place.seed}"),
        *(f"run_id={run_id}", f"output_dir={place.run}", *(("--resume",) if started else ())),
        name=f"train {place}",
        threads=threads,
        log=place.folder / "train.log",
    )


def perform(
    stages: Stages, options: argparse.Namespace, recipe: Recipe, variant: Variant, place: Place, progress: Progress
) -> None:
    """Train and evaluate one run, as far as that is not done.

    Raises:
        StageFailed: one of the two failed.
    """
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.at_once)
    place.folder.mkdir(parents=True, exist_ok=True)
    if not place.trained:
        began = time.monotonic()
        write_json(place.folder / SPEED, {"processor": processor(), "threads": threads, "at_once": options.at_once})
        train(stages, options.recipe, variant, place, threads)
        progress.done("train", place, time.monotonic() - began)
    if not place.evaluated:
        began = time.monotonic()
        stages.run(
            "specforge_dspine.evaluate",
            *("--draft", place.draft, "--target", recipe.host.model.target_model_path, "--sets", *options.sets),
            *("--max-new-tokens", options.max_new_tokens, "--out", place.evaluation),
            *(("--limit", options.limit) if options.limit else ()),
            name=f"evaluate {place}",
            threads=threads,
            log=place.folder / "evaluate.log",
        )
        progress.done("evaluate", place, time.monotonic() - began)


def ablate(options: argparse.Namespace) -> None:
    """Everything that the command line says.

    Raises:
        ValueError: a recipe, variant or set that cannot be used, or ``--out`` belongs to other inputs.
        StageFailed: a training, an evaluation or the report failed.
    """
    variants = parse_variants(options.variants)
    recipe = load_recipe(options.recipe)
    overridden = {each.name: load_recipe(options.recipe, each.overrides).resolved()["dspine"] for each in variants}
    check_apart(overridden)
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"--seeds {' '.join(map(str, options.seeds))}: a seed occurs twice")
    inputs = inputs_of(recipe, overridden, options)
    with exclusive(options.out):
        claim(options.out, inputs)
        compare(options, recipe, variants)


def compare(options: argparse.Namespace, recipe: Recipe, variants: Sequence[Variant]) -> None:
    """Train, evaluate and report, as far as that is not done.

    Raises:
        StageFailed: a training, an evaluation or the report failed.
    """
    # Seed by seed: an ablation that is stopped has compared all variants.
    chosen = [
        (each, Place(options.out, each.name, seed)) for seed, each in itertools.product(options.seeds, variants)
    ]
    progress = Progress([place for _, place in chosen], options.at_once)
    print(f"{progress.all - sum(progress.left.values())} of {progress.all} parts are done already", flush=True)
    with Stages() as stages:
        jobs = [partial(perform, stages, options, recipe, *each, progress) for each in chosen]
        together(stages, jobs, options.at_once)
        stages.run("specforge_dspine.ablation_report", "--ablation", options.out)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", type=Path, required=True, help="the recipe that the variants are of")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--sets", nargs="+", required=True, metavar="SET", help=SYNTAX)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (default 256)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of each set (default: all)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1 if torch.cuda.is_available() else 2,
        help="runs at a time (default: 2, on GPUs 1)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of each run (default: its share of the cores)")
    options = parser.parse_args(argv)
    if options.at_once < 1:
        parser.error(f"--at-once {options.at_once}: must be at least 1")
    try:
        with unwinding_signals():
            ablate(options)
    except (ValueError, OSError, StageFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as received:
        print(f"stopped by {received}; the same command continues", file=sys.stderr)
        return 128 + received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
