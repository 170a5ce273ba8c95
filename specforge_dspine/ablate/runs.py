"""Training and evaluation of each variant and seed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.ablate.variants import VARIANTS
from specforge_dspine.evaluation.benchmarks import SYNTAX, EvaluationSet
from specforge_dspine.evaluation.results import RESULT
from specforge_dspine.formats.config_json import CONFIG
from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.resume_contract import data_identity
from specforge_dspine.training.run_checkpoints import checkpoint_folders, newest_complete
from specforge_dspine.training.run_dir import exclusive
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.differences import differences
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import read_json, write_json
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.machine import processor
from specforge_dspine.utils.stages import Stages
from specforge_dspine.utils.versions import VERSION, installed

logger = logging.getLogger(__name__)

INPUTS, SPEED = "inputs.json", "speed.json"
LAYOUT = "specforge"  # every variant has it, and it is the last that a run exports
NOT_INPUTS = {  # keys of a recipe that differ from run to run or only name a place
    "": ("run_id", "output_dir"),
    "training": ("seed",),
    "data": ("hidden_states_path", "prompts_path", "cache_dir"),
    "model": ("target_model_path",),
}


class AblateOptions(Options):
    """Options of an ablation."""

    recipe: Path = option("recipe to vary")
    out: Path = option("folder for runs, evaluations and the report")
    variants: tuple[str, ...] = option("default: all", default=tuple(VARIANTS), metavar="NAME")
    seeds: tuple[int, ...] = option("of the trainings", default=(1, 2, 3), metavar="N")
    sets: tuple[str, ...] = option(SYNTAX, metavar="SET")
    max_new_tokens: int = option("tokens of a response", default=256, ge=1)
    limit: int | None = option("prompts of each set; default: all", default=None, ge=1)
    max_parallel: int = option("runs at a time", default=1 if torch.cuda.is_available() else 2, ge=1)
    threads: int | None = option("CPU threads of each run; default: its share of the cores", default=None, ge=1)


class VariantRun:
    """The training of a variant with a seed, and its evaluation: where both are, and how far they have come."""

    def __init__(self, ablation: Path, variant: str, seed: int, overrides: Sequence[str] = ()) -> None:
        self.variant, self.seed, self.overrides = variant, seed, overrides
        self.folder = ablation / variant / f"seed{seed}"
        self.run, self.evaluation = self.folder / "run", self.folder / "evaluation"
        self.draft = self.run / "export" / LAYOUT

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def trained(self) -> bool:
        """Whether the training has ended: only then there is an export."""
        return (self.draft / CONFIG).is_file()

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation has ended: its result is written last."""
        return (self.evaluation / RESULT).is_file()

    def train(self, stages: Stages, recipe: Path, threads: int) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            StageError: the training failed.
        """
        log, run_id = self.run / METRICS_FILE, f"{self.variant}-seed{self.seed}"
        resume = bool(checkpoint_folders(self.run)) or (log.exists() and log.stat().st_size > 0)
        if resume:
            with exclusive(self.run):
                try:
                    newest_complete(self.run, run_id)
                except RecipeError:  # it was killed while it wrote the first checkpoint
                    shutil.rmtree(self.run)
                    resume = False
        stages.run(
            "specforge_dspine.train",
            *("--recipe", recipe, *self.overrides, f"training.seed={self.seed}"),
            *(f"run_id={run_id}", f"output_dir={self.run}", *(("--resume",) if resume else ())),
            name=f"train {self}",
            threads=threads,
            log=self.folder / "train.log",
        )

    def evaluate(self, stages: Stages, options: AblateOptions, target: str, threads: int) -> None:
        """Evaluate the trained draft, after the last response of a stopped evaluation.

        Raises:
            StageError: the evaluation failed.
        """
        stages.run(
            "specforge_dspine.evaluate",
            *("--draft", self.draft, "--target", target, "--sets", *options.sets),
            *("--max-new-tokens", options.max_new_tokens, "--out", self.evaluation),
            *(("--limit", options.limit) if options.limit else ()),
            name=f"evaluate {self}",
            threads=threads,
            log=self.folder / "evaluate.log",
        )


class Progress:
    """How much of all trainings and evaluations is done, and how long the rest may take."""

    def __init__(self, runs: Sequence[VariantRun], max_parallel: int) -> None:
        self.left = {
            "train": sum(not run.trained for run in runs),
            "evaluate": sum(not run.evaluated for run in runs),
        }
        self.total, self.max_parallel = 2 * len(runs), max_parallel
        self.seconds: dict[str, list[float]] = {part: [] for part in self.left}
        self._lock = threading.Lock()
        logger.info("%d of %d parts are done already", self.done, self.total)

    @property
    def done(self) -> int:
        """Number of parts that are done."""
        return self.total - sum(self.left.values())

    def add(self, part: str, run: VariantRun, seconds: float) -> None:
        """Count and log a ``part`` of a run that has ended."""
        with self._lock:
            self.left[part] -= 1
            self.seconds[part].append(seconds)
            logger.info(
                "\n[%d of %d done, %s] %s: %s %.0f s", self.done, self.total, self.time_left(), run, part, seconds
            )

    def time_left(self) -> str:
        """An estimate from the mean time of each kind of part."""
        if any(count and not self.seconds[part] for part, count in self.left.items()):
            return "time left unknown"
        total = sum(
            count * sum(self.seconds[part]) / len(self.seconds[part]) for part, count in self.left.items() if count
        )
        return f"about {total / self.max_parallel / 60:.0f} min left"


def train_and_evaluate(
    stages: Stages, options: AblateOptions, recipe: Recipe, run: VariantRun, progress: Progress
) -> None:
    """Train and evaluate one run, as far as that is not done.

    Raises:
        StageError: one of the two failed.
    """
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.max_parallel)
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.trained:
        started = time.monotonic()
        speed = {"processor": processor(), "threads": threads, "max_parallel": options.max_parallel}
        write_json(run.folder / SPEED, speed)
        run.train(stages, options.recipe, threads)
        progress.add("train", run, time.monotonic() - started)
    if not run.evaluated:
        started = time.monotonic()
        run.evaluate(stages, options, recipe.host.model.target_model_path, threads)
        progress.add("evaluate", run, time.monotonic() - started)


def ablation_inputs(
    recipe: Recipe, sections: dict[str, dict[str, Any]], sets: Sequence[EvaluationSet], max_new_tokens: int
) -> dict[str, Any]:
    """What all runs depend on: data, target and sets by content, and the ``dspine`` section of each variant."""
    document = recipe.resolved()
    del document["dspine"]
    for section, keys in NOT_INPUTS.items():
        values = document[section] if section else document
        for key in keys:
            values.pop(key, None)
    return {
        "recipe": document,
        "variants": sections,
        "data": data_identity(recipe.host),
        "target": model_fingerprint(Path(recipe.host.model.target_model_path)),
        "sets": {each.name: {"prompts": len(each.prompts), "sha256": each.sha256()} for each in sets},
        "max_new_tokens": max_new_tokens,
        "versions": {name: installed(name) for name in ("torch", "transformers", "specforge")}
        | {"specforge_dspine": VERSION},
    }


def check_distinct(sections: dict[str, dict[str, Any]]) -> None:
    """Check that no two variants are the same training.

    Raises:
        ValueError: two are, for example because the recipe itself is a variant.
    """
    seen: dict[str, str] = {}
    for name, section in sections.items():
        other = seen.setdefault(json.dumps(section, sort_keys=True), name)
        if other != name:
            raise ValueError(
                f"variants {other} and {name} are the same training with this recipe; leave one of them out of "
                "--variants, or give a recipe with the full method"
            )


def claim_folder(out: Path, inputs: dict[str, Any]) -> None:
    """Record the inputs of a new ablation in ``out``, or add new variants to those of an existing one.

    Raises:
        ValueError: ``out`` belongs to other inputs; all differences are named.
    """
    path = out / INPUTS
    if path.exists():
        before = read_json(path)
        known = before["variants"]
        common = [name for name in inputs["variants"] if name in known]
        then = before | {"variants": {name: known[name] for name in common}}
        now = inputs | {"variants": {name: inputs["variants"][name] for name in common}}
        changes = [f"{name} was {was} and is {value}" for name, was, value in differences(then, now)]
        if changes:
            raise ValueError(
                f"{out} holds an ablation of other inputs ({'; '.join(changes)}); restore them, or use a new --out"
            )
        inputs = inputs | {"variants": known | inputs["variants"]}
    write_json(path, inputs)
