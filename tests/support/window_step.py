"""One optimizer window through SpecForge's backend and our core, split in several ways (test_optimizer_window.py).

    torchrun --nproc_per_node N -m tests.support.window_step OUT.pt

Every rank takes its share of the same eight sequences. Rank 0 writes, per split, the logged loss and every gradient
as the optimizer would see it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerCore
from specforge.training.strategies.base import StepContext

from specforge_dspine.training.optimizer_window import WindowCore
from specforge_dspine.training.strategy import DSpineTrainStrategy
from tests.support.drafts import make_batch, make_model

SEQUENCES, STEP, TOTAL = 8, 30, 120  # λ at its plateau, and some blocks still replaced
# name: (normalization, scope, indices of sequences that supervise nothing)
CASES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "window": ("separate", "window", ()),
    "shared": ("shared", "microbatch", ()),
    "microbatch": ("separate", "microbatch", ()),
    "lonely": ("separate", "window", (1, 3, 5, 7)),  # all that rank 1 of 2 has
    "empty": ("separate", "window", tuple(range(SEQUENCES))),
}


class Recorder:
    """Where SpecForge expects an optimizer: keeps the gradients and steps nowhere."""

    def __init__(self, draft: torch.nn.Module) -> None:
        self.draft, self.gradients = draft, {}

    def step(self) -> torch.Tensor:
        self.gradients = {n: p.grad.clone() for n, p in self.draft.named_parameters() if p.grad is not None}
        self.draft.zero_grad()
        return torch.stack([g.norm() for g in self.gradients.values()]).norm()


def sequences(silent: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Eight sequences [8, S, ..] of very different numbers of supervised tokens."""
    tensors = make_batch(SEQUENCES, 24, seed=3)
    for index in range(SEQUENCES):
        tensors["loss_mask"][index, 6 + 2 * index :] = 0  # 2 supervised tokens up to 16
        tensors["loss_mask"][index, 10:11] = 0  # and a hole
    tensors["loss_mask"][list(silent)] = 0
    return tensors


def micro_batches(tensors: dict[str, torch.Tensor], mine: list[int], count: int) -> Iterator[TrainBatch]:
    """``mine`` as ``count`` micro-batches."""
    size = len(mine) // count
    for start in range(0, len(mine), size):
        picked = mine[start : start + size]
        yield TrainBatch([f"s{i}" for i in picked], "dspine", {k: v[picked].clone() for k, v in tensors.items()})


def step(case: str, count: int, rank: int, ranks: int) -> dict[str, Any]:
    """Loss and gradients of the window as ``count`` micro-batches a rank."""
    normalization, scope, silent = CASES[case]
    model = make_model(seed=5)
    model.normalization, model.normalization_scope = normalization, scope
    backend = FSDPTrainingBackend(ParallelConfig.from_distributed(), optimizer_factory=Recorder)
    wrapped = backend.prepare_model(model, optimizer_target=model.draft_model)
    forwards: list[None] = []
    wrapped.register_forward_hook(lambda *_: forwards.append(None))
    strategy = DSpineTrainStrategy(wrapped, seed=11, warmup_ratio=0.1)
    core = WindowCore(TrainerCore(strategy, backend, accumulation_steps=count))
    mine = list(range(rank, SEQUENCES, ranks))
    for batch in micro_batches(sequences(silent), mine, count):
        result = core.train_step(batch, StepContext(STEP, TOTAL))
    assert result.optimizer_stepped and core.accumulation_remainder == 0
    recorder: Any = backend.optimizer
    return {"metrics": result.metrics, "gradients": recorder.gradients, "forwards": len(forwards)}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for case in CASES:
        for count in (1, 2, 4, 8):
            if count * ranks <= SEQUENCES:
                results[case, count] = step(case, count, rank, ranks)
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig()
    torch.set_num_threads(1)
    main(sys.argv[1])
