"""Work that rank 0 does for all ranks, without leaving the others waiting when it fails; a run's own environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from specforge_dspine.utils.errors import RunError


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """What a run sets in ``os.environ`` (rendezvous, sharding) ends with it: the next run in this process, or a
    process that it starts, would meet the same port."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def on_every_rank(rank: int, action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give its result to all; its failure is raised on all ranks.

    Raises:
        RunError: on ranks other than 0, when rank 0 failed.
    """
    outcome: list[Any] = [None, None]
    failure: BaseException | None = None
    if rank == 0:
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
