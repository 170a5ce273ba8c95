"""Training and evaluation of each variant and seed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch

from specforge_dspine.ablate.variants import VARIANTS
from specforge_dspine.evaluation.benchmarks import SYNTAX
from specforge_dspine.evaluation.results import RESULT
from specforge_dspine.formats.config_json import CONFIG
from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.run_checkpoints import checkpoint_folders, newest_complete
from specforge_dspine.training.run_dir import exclusive
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.machine import processor
from specforge_dspine.utils.stages import Stages

logger = logging.getLogger(__name__)

SPEED = "speed.json"
LAYOUT = "specforge"  # every variant has it, and it is the last that a run exports


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
        """Whether the training has ended; the export is its last step."""
        return (self.draft / CONFIG).is_file()

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation has ended; its result is written last."""
        return (self.evaluation / RESULT).is_file()

    def train(self, stages: Stages, recipe: Path, threads: int) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
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
        """Evaluate the trained draft, from where a stopped evaluation ended."""
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
        trained, evaluated = sum(run.trained for run in runs), sum(run.evaluated for run in runs)
        self.left = {"train": len(runs) - trained, "evaluate": len(runs) - evaluated}
        self.total, self.max_parallel = 2 * len(runs), max_parallel
        self.seconds: dict[str, list[float]] = {part: [] for part in self.left}
        self._lock = threading.Lock()
        logger.info("%d of %d parts are done already", self.done, self.total)

    @property
    def done(self) -> int:
        """Number of parts that are done."""
        return self.total - sum(self.left.values())

    @contextlib.contextmanager
    def part(self, part: str, run: VariantRun) -> Iterator[None]:
        """Time a part of a run ("train" or "evaluate"), and log it at its end."""
        started = time.monotonic()
        yield
        with self._lock:
            self.left[part] -= 1
            self.seconds[part].append(time.monotonic() - started)
            message = f"[{self.done} of {self.total} done, {self.time_left()}] {run}: {part}"
            logger.info("\n%s %.0f s", message, self.seconds[part][-1])

    def time_left(self) -> str:
        """An estimate from the mean time of each kind of part."""
        open_parts = {part: count for part, count in self.left.items() if count}
        if not all(self.seconds[part] for part in open_parts):
            return "time left unknown"
        total = sum(count * fmean(self.seconds[part]) for part, count in open_parts.items())
        return f"about {total / self.max_parallel / 60:.0f} min left"


def train_and_evaluate(
    stages: Stages, options: AblateOptions, recipe: Recipe, run: VariantRun, progress: Progress
) -> None:
    """Train and evaluate one run, as far as that is not done."""
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.max_parallel)
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.trained:
        speed = {"processor": processor(), "threads": threads, "max_parallel": options.max_parallel}
        write_json(run.folder / SPEED, speed)
        with progress.part("train", run):
            run.train(stages, options.recipe, threads)
    if not run.evaluated:
        with progress.part("evaluate", run):
            run.evaluate(stages, options, recipe.target_path, threads)
