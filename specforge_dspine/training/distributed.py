"""Ranks of a run: their process group, and work that rank 0 does for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from accelerate.utils import set_seed
from specforge.distributed import destroy_distributed, init_distributed

from specforge_dspine.training.recipe import as_recipe_error
from specforge_dspine.training.specforge_internals import bootstrap_single_process_env
from specforge_dspine.utils.errors import RunError


@contextlib.contextmanager
def process_group(*, fsdp_sharding: str, seed: int, timeout_minutes: int) -> Iterator[int]:
    """Join the ranks' process group, with a seed; yields this process's rank.

    The environment is restored at the end: the next run in this process, or a child process, must not meet this
    run's port.
    """
    before = dict(os.environ)
    try:
        os.environ["FSDP_SHARDING"] = fsdp_sharding  # else SpecForge's backend ignores the recipe
        set_seed(seed)
        with as_recipe_error("launch"):
            bootstrap_single_process_env()
        init_distributed(timeout=timeout_minutes)
        try:
            yield dist.get_rank()
        finally:
            destroy_distributed()
    finally:
        os.environ.clear()
        os.environ.update(before)


def on_every_rank(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and return its result on all ranks; its failure is raised on all ranks.

    Raises:
        RunError: on ranks other than 0, when rank 0 failed.
    """
    outcome: list[Any] = [None, None]
    failure: BaseException | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except BaseException as error:
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RunError(f"rank 0 failed: {outcome[1]}")
    return outcome[0]
