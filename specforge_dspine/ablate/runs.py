"""Training and evaluation of each variant and seed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.ablate.variants import Variant
from specforge_dspine.evaluate import open_sets
from specforge_dspine.evaluation.results import RESULT
from specforge_dspine.formats.config_json import CONFIG
from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.resume_contract import data_identity
from specforge_dspine.training.run_checkpoints import checkpoint_folders, newest_complete
from specforge_dspine.training.run_dir import exclusive
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import read_json, write_json
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.machine import processor
from specforge_dspine.utils.stages import Stages
from specforge_dspine.utils.versions import VERSION, installed

INPUTS, SPEED = "inputs.json", "speed.json"
FLAVOR = "specforge"  # every variant has it, and it is the last that a run exports
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
        self.draft = self.run / "export" / FLAVOR

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
        "data": data_identity(recipe.data_path),
        "target": model_fingerprint(Path(recipe.target_path)),
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
        StageError: the training failed.
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
        StageError: one of the two failed.
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
            *("--draft", place.draft, "--target", recipe.target_path, "--sets", *options.sets),
            *("--max-new-tokens", options.max_new_tokens, "--out", place.evaluation),
            *(("--limit", options.limit) if options.limit else ()),
            name=f"evaluate {place}",
            threads=threads,
            log=place.folder / "evaluate.log",
        )
        progress.done("evaluate", place, time.monotonic() - began)
