"""A run's folder: which process holds it, what of it may be continued, and its small files."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.run_checkpoints import (
    checkpoint_folders,
    newest_complete,
    remove_unusable_checkpoints,
)
from specforge_dspine.training.run_logger import BEST, METRICS_FILE, logged_scores, rewind_metrics
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import write_json

RECIPE_FILE, DRAFT_CONFIG_FILE, DELIVERY_LOG = "recipe.yaml", "draft_config.json", "delivered.jsonl"


@contextlib.contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder; the lock goes with this process, however it ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"output_dir={str(run_dir)!r}: another process is running there") from None
        yield


def holds_run(run_dir: Path) -> bool:
    """Whether a run took a step there: a checkpoint's folder, or a logged step."""
    log = run_dir / METRICS_FILE
    return bool(checkpoint_folders(run_dir)) or (log.exists() and log.stat().st_size > 0)


def check_run_dir(recipe: Recipe, *, resume: bool) -> str | None:
    """Refuse a folder that holds a run, or find the checkpoint to continue from (None: from the beginning).

    Nothing of an earlier run is changed yet: see ``initialize_run_dir``. A start that failed before its first step
    left nothing worth keeping, and counts as no run.
    """
    run_dir = recipe.run_dir
    if holds_run(run_dir) and not resume:
        raise RecipeError(
            f"output_dir={str(run_dir)!r} already holds a run; continue it with --resume, or give another output_dir"
        )
    if resume and not holds_run(run_dir):
        raise RecipeError(f"output_dir={str(run_dir)!r} holds no run to resume; start it without --resume")
    if not resume:
        (run_dir / DELIVERY_LOG).unlink(missing_ok=True)  # of a start that failed
        return None
    checkpoint = newest_complete(run_dir, recipe.run_id)
    return None if checkpoint is None else str(checkpoint)


def initialize_run_dir(recipe: Recipe, draft_config: dict[str, Any], step: int) -> None:
    """Write the resolved recipe and the draft's config, and remove what came after the checkpoint at ``step``."""
    remove_unusable_checkpoints(recipe.run_dir, recipe.run_id, step)
    recipe.save(recipe.run_dir / RECIPE_FILE)
    write_json(recipe.run_dir / DRAFT_CONFIG_FILE, draft_config)
    rewind_metrics(recipe.run_dir / METRICS_FILE, step)


def restore_best(recipe: Recipe, step: int) -> None:
    """Mark the best checkpoint again, from ``metrics.jsonl`` up to the ``step`` that a run continues from.

    SpecForge's own mark may name a checkpoint that is gone, or lack one that was written when the run was killed.
    Another held-out set than before starts without a mark. To be called before SpecForge's trainer reads it.
    """
    run_dir, run_id = recipe.run_dir, recipe.run_id
    meta, link = run_dir / f"{run_id}.best_meta.json", run_dir / f"{run_id}-best"
    scores: dict[int, float] = {}
    before = yaml.safe_load((run_dir / RECIPE_FILE).read_text(encoding="utf-8")).get("heldout")
    if recipe.heldout is not None and before == recipe.heldout.model_dump(mode="json"):
        scores = {s: score for s, score in logged_scores(run_dir / METRICS_FILE) if s <= step}
    kept = {folder.step for folder in checkpoint_folders(run_dir) if folder.run_id == run_id}
    ranking = sorted((-score, s) for s, score in scores.items() if s in kept)
    meta.unlink(missing_ok=True)
    link.unlink(missing_ok=True)
    if ranking:
        score, best = ranking[0]
        link.symlink_to(f"{run_id}-step{best}")
        write_json(meta, {"run_id": run_id, "step": best, "score": -score, "metric": BEST, "metrics": {}})
