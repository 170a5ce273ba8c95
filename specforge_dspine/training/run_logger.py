"""Metrics of a run: one JSON line per logged step, SpecForge's tracker, a log line.

Every metric arrives as a ratio that SpecForge formed after summing numerator and count over micro-batches and
ranks. Field names are documented in docs/metrics.md.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specforge.training.tracking import create_tracker_logger, scalar_metrics

from specforge_dspine.training.plan_parts import Plan
from specforge_dspine.utils.files import atomic_write

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
BEST = "eval/simulated_acc_len"  # SpecForge's name for the metric of the best checkpoint
SHOWN = ("loss", "ce", "refined_ce", "coverage", "accuracy", "refined_accuracy", "refined_tau", "lr")


class RunLogger:
    """SpecForge's logger seam: ``logger(metrics, step)`` and ``close()``. Only rank 0 writes."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.steps = rank, plan.schedule.steps
        self._micro_batches = plan.schedule.ranks * plan.schedule.accumulation_steps
        self._path = plan.run_dir / METRICS_FILE
        self._tracker = None
        if plan.tracker is not None:
            self._tracker = create_tracker_logger(SimpleNamespace(**plan.tracker), str(plan.run_dir))

    def __call__(self, metrics: dict[str, Any], step: int) -> None:
        values = scalar_metrics(metrics)
        values |= rates(values, self._micro_batches)
        if self._tracker is not None:
            self._tracker(values, step)
        if self.rank != 0:
            return
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        if not sys.stderr.isatty():  # on a terminal SpecForge draws its progress bar there
            prefix = "eval/" if "eval/loss" in values else ""
            shown = " ".join(f"{name} {values[prefix + name]:.4g}" for name in SHOWN if prefix + name in values)
            logger.info("step %d/%d  %s%s", step, self.steps, "held out: " * bool(prefix), shown)

    def close(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._tracker.close()


def rates(values: dict[str, float], micro_batches: int) -> dict[str, float]:
    """Return supervised positions and tokens per second, and the share of time spent waiting for data.

    ``rows`` (positions) and ``supervised_tokens`` are means over the step's ``micro_batches`` of all ranks. SpecForge
    measures seconds per optimizer step since the step logged before.
    """
    seconds = values.get("perf/optimizer_step_time_s", 0.0)
    if seconds <= 0:
        return {}
    return {
        "rows_per_second": values["rows"] * micro_batches / seconds,
        "tokens_per_second": values["supervised_tokens"] * micro_batches / seconds,
        "wait_share": values["perf/data_wait_time_s"] / seconds,
    }


def logged_scores(path: Path) -> Iterator[tuple[int, float]]:
    """Yield (step, score of the best checkpoint's metric) of every held-out line of ``metrics.jsonl``."""
    for line in complete_lines(path):
        if BEST in line:
            values = json.loads(line)
            yield values["step"], values[BEST]


def rewind_metrics(path: Path, step: int) -> None:
    """Keep the lines of ``metrics.jsonl`` up to ``step``: later ones are computed again."""
    with atomic_write(path) as file:
        file.writelines(line.encode() for line in complete_lines(path) if json.loads(line)["step"] <= step)


def complete_lines(path: Path) -> list[str]:
    """Return the lines of ``metrics.jsonl`` but for one that a killed run left half written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]
