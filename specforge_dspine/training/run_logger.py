"""What a run reports: one JSON line per logged step, SpecForge's tracker, a line on the console.

Every metric arrives as a ratio that SpecForge formed after summing numerator and count over micro-batches and
ranks. Field names are documented in docs/metrics.md.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specforge.config import Config
from specforge.training.tracking import create_tracker_logger, scalar_metrics

METRICS_FILE = "metrics.jsonl"
BEST = "eval/simulated_acc_len"  # SpecForge's name for what the best checkpoint is best at
CONSOLE = ("loss", "ce", "refined_ce", "coverage", "accuracy", "refined_accuracy", "refined_tau", "lr")


class RunLogger:
    """SpecForge's logger seam: ``logger(metrics, step)`` and ``close()``. Only rank 0 writes."""

    def __init__(self, config: Config, *, rank: int, steps: int, micro_batches: int) -> None:
        self.rank, self.steps, self.micro_batches = rank, steps, micro_batches
        self._tracker = None
        if config.tracking.report_to != "none":
            options = config.tracking.model_dump()
            for name in ("wandb_name", "swanlab_name", "mlflow_run_name"):
                options[name] = options[name] or config.run_id
            for name in ("wandb_project", "swanlab_project", "mlflow_experiment_name"):
                options[name] = options[name] or "specforge-dspine"
            self._tracker = create_tracker_logger(SimpleNamespace(**options), config.output_dir)
        self._path = Path(config.output_dir) / METRICS_FILE

    def __call__(self, metrics: dict[str, Any], step: int) -> None:
        values = scalar_metrics(metrics)
        values |= rates(values, self.micro_batches)
        if self._tracker is not None:
            self._tracker(values, step)
        if self.rank == 0:
            line = {"step": step, "time": round(time.time(), 3)} | {k: _json(v) for k, v in values.items()}
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            if not sys.stderr.isatty():  # on a terminal SpecForge draws its progress bar there
                prefix = "eval/" if "eval/loss" in values else ""
                shown = " ".join(f"{name} {values[prefix + name]:.4g}" for name in CONSOLE if prefix + name in values)
                print(f"step {step}/{self.steps}  {'held out: ' * bool(prefix)}{shown}", flush=True)

    def close(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._tracker.close()


def rates(values: dict[str, float], micro_batches: int) -> dict[str, float]:
    """Rows and supervised tokens per second, and the share of time spent waiting for data, of a logged step.

    ``rows`` and ``supervised_tokens`` are means over the step's ``micro_batches`` of all ranks; SpecForge measures
    seconds per optimizer step since the step logged before.
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
    """(step, what the best checkpoint is best at) of every held-out line of ``metrics.jsonl``."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n") and BEST in line:
            values = json.loads(line)
            yield values["step"], values[BEST]


def rewind_metrics(path: Path, step: int) -> None:
    """Keep the lines of ``metrics.jsonl`` up to ``step``: what came after a checkpoint is computed again.

    A line that a killed run left half written goes too. The file is replaced atomically.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def _json(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
