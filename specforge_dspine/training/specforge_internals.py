"""SpecForge's private names that we use. Everything else goes through its public seams.

``train_windows`` is the one patch: SpecForge's ``Trainer`` builds its core itself, and its evaluator knows no
refinement. Our core (optimizer_window.py) overrides ``TrainerCore._normalize_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specforge.algorithms.model_providers import _build_dflash_family_model as build_dflash_family_model
from specforge.cli import _bootstrap_single_process_env as bootstrap_single_process_env
from specforge.training.assembly import _optimizer_factory as optimizer_factory
from specforge.training.controller import TrainerCore

__all__ = ["bootstrap_single_process_env", "build_dflash_family_model", "optimizer_factory", "train_windows"]


def train_windows(trainer: Any, make_core: Callable[[TrainerCore], TrainerCore], evaluate: Callable[[], Any]) -> None:
    """Replace the core of SpecForge's ``trainer``, which has not stepped yet, and its periodic evaluation."""
    controller = trainer._controller
    trainer.core = controller.core = make_core(trainer.core)
    controller.evaluate_configured = evaluate
