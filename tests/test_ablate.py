"""Ablations: what a variant is, runs that are stopped and continued to the same result, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from features import write_features
from runs import assert_same_run, kill_group, wait_until
from small import save_tokenizer, tiny_recipe, write_samples
from targets import build_qwen3

from specforge_dspine.ablate import Place

LAYERS = [0, 2, 4]
VARIANTS, SEEDS = ("full", "dflash"), (1, 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, features to train on, two sets of captured answers, and a recipe."""
    root = tmp_path_factory.mktemp("ablate")
    target = save_tokenizer(build_qwen3(root / "target"))
    for name, count, seed in (("features", 12, 0), ("near", 4, 5), ("far", 3, 6)):
        write_features(target, write_samples(root / f"{name}.jsonl", count, seed=seed), root / name, LAYERS)
    document = tiny_recipe(
        target,
        root / "unused",
        data={"hidden_states_path": str(root / "features")},
        training={"max_steps": 12, "total_steps": 12, "num_epochs": 100, "batch_size": 1, "save_interval": 3},
    )
    (root / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")
    return root


def words(world: Path, out: Path, *extra: object, variants: tuple[str, ...] = VARIANTS) -> list[str]:
    given = [
        *("--recipe", world / "recipe.yaml", "--out", out, "--variants", *variants, "--seeds", *SEEDS),
        *("--sets", f"captured={world / 'near'}", f"captured={world / 'far'}", "--max-new-tokens", 16, *extra),
    ]
    return [sys.executable, "-m", "specforge_dspine.ablate", *map(str, given)]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300)


def places(out: Path) -> list[Place]:
    return [Place(out, variant, seed) for variant in VARIANTS for seed in SEEDS]
