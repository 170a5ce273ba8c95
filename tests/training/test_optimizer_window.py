"""Exact over micro-batches and ranks: the objective and every gradient of one window, before the optimizer."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.window_step import CASES, SEQUENCES

Steps = dict[tuple[str, int], dict[str, Any]]
EXACT = 1e-6  # float64 with float32 softmax accumulators in the host's norms and RoPE


def run_steps(ranks: int, out: Path) -> tuple[Steps, str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)),
            *("-m", "tests.support.window_step", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "FSDP_SHARDING": "NO_SHARD"},
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=False), done.stderr


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Steps, str]]:
    """Every split of one window, on one rank and on two."""
    root = tmp_path_factory.mktemp("windows")
    return {ranks: run_steps(ranks, root / f"{ranks}.pt") for ranks in (1, 2)}


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference between two steps' gradients, relative to the largest entry of each weight's."""
    assert a["gradients"].keys() == b["gradients"].keys()
    pairs = [(a["gradients"][n], b["gradients"][n]) for n in a["gradients"]]
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-9)) for x, y in pairs)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["window", "shared", "lonely"])
def test_every_split_has_the_same_objective_and_gradients(windows: Any, case: str) -> None:
    """1 × 8, 8 × 1 and 2 ranks × 4, and what lies between; also where one rank supervises nothing."""
    whole = windows[1][0][case, 1]
    assert whole["metrics"]["loss"] > 0 and whole["metrics"]["lambda"] > 0
    compared = 0
    for ranks, (steps, _) in windows.items():
        for (name, count), split in steps.items():
            if name != case:
                continue
            assert distance(split, whole) < EXACT, (ranks, count)
            assert split["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=EXACT)
            assert split["metrics"]["lambda"] == pytest.approx(whole["metrics"]["lambda"], rel=EXACT)
            compared += 1
    assert compared == 7


@pytest.mark.ranks
def test_as_published_the_refinement_depends_on_the_split_but_the_gate_does_not(windows: Any) -> None:
    whole, single = (windows[1][0]["microbatch", count] for count in (1, SEQUENCES))
    assert distance(single, whole) > 1e-3
    assert single["metrics"]["lambda"] == pytest.approx(whole["metrics"]["lambda"], rel=EXACT)
    halves = windows[2][0]["microbatch", 4], single
    assert distance(*halves) < EXACT, "the same micro-batches on two ranks are the same window"


@pytest.mark.ranks
def test_logged_loss_is_the_optimized_loss(windows: Any) -> None:
    """Over a window of many micro-batches: each logged part is the window's ratio, and the loss is their sum."""
    for ranks, (steps, _) in windows.items():
        for count in (1, 4):
            m = steps["window", count]["metrics"]
            parts = 0.1 * (m["ce"] + m["refined_ce"]) + 0.9 * (m["l1"] + m["refined_l1"])
            align = m["lambda"] * sum(value for name, value in m.items() if name.startswith("align_"))
            assert m["loss"] == pytest.approx(parts + align, rel=1e-6), (ranks, count)
            assert m["lambda"] == pytest.approx(m["beta"] * m["ce"], rel=1e-6)


@pytest.mark.ranks
def test_one_micro_batch_pays_no_extra_pass(windows: Any) -> None:
    for steps, _ in (windows[1], windows[2]):
        for case in CASES:
            assert steps[case, 1]["forwards"] == 1
            assert steps[case, 4]["forwards"] == 8


@pytest.mark.ranks
def test_a_window_without_supervision_takes_its_step_with_zero_gradient(windows: Any) -> None:
    for steps, stderr in windows.values():
        step = steps["empty", 2]
        assert step["metrics"]["loss"] == 0 and math.isfinite(step["metrics"]["grad_norm"])
        assert all(not gradient.any() for gradient in step["gradients"].values())
        assert "nothing is supervised in this optimizer window" in stderr
