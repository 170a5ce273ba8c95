"""Optimizer windows: sums over all micro-batches and ranks of a step, for the loss of each micro-batch (§5).

    window = Σ over micro-batches and ranks of (ΣwCE, W, W_c, W_m)
    λ = β · window[0] / window[1];   scope "window" divides the refinement by window[2] and window[3]

SpecForge's ``TrainerCore`` backpropagates each micro-batch as it comes. ``WindowCore`` holds a window's micro-batches
back on the host, adds up their sums in one gradient-free pass, reduces them over ranks once, and then trains them as
SpecForge does. Draws are keyed by sample, so both passes see the same blocks. A window of one micro-batch needs no
extra pass: its sums are reduced over ranks while its loss is formed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from specforge.runtime.contracts import TrainBatch
from specforge.training.controller import StepResult, TrainerCore
from specforge.training.strategies.base import StepContext
from torch import Tensor

from specforge_dspine.objective.loss import WindowReduce, identity
from specforge_dspine.training.strategy import DSpineTrainStrategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WindowContext(StepContext):
    """SpecForge's schedule state, and the reduction of a micro-batch's sums to its window's."""

    window_reduce: WindowReduce = identity


class WindowCore(TrainerCore):
    """SpecForge's step over whole optimizer windows; replaces ``core``, which has not stepped yet.

    The loss of a window in which nothing is supervised is 0: its step has zero gradient, and a warning.
    """

    def __init__(self, core: TrainerCore) -> None:
        super().__init__(core.strategy, core.backend, accumulation_steps=core.accumulation_steps)
        self.held: list[TrainBatch] = []

    @property
    def accumulation_remainder(self) -> int:
        """Micro-batches that belong to no optimizer step yet."""
        return len(self.held)

    def train_step(self, batch: TrainBatch, ctx: StepContext | None = None) -> StepResult:
        """Hold ``batch``, or train the window that it completes.

        Raises:
            FloatingPointError: loss or gradient is not finite; on all ranks, and before a checkpoint is written.
        """
        self.held.append(batch)
        if len(self.held) < self.accumulation_steps:
            return StepResult(optimizer_stepped=False, loss=math.nan, grad_norm=None)
        window, self.held = self.held, []
        context = ctx or StepContext()
        window_reduce = self.window_reduce_of(window, context)
        for micro_batch in window:
            step_context = WindowContext(context.global_step, context.total_steps, window_reduce)
            result = super().train_step(micro_batch, step_context)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm or 0.0)):
            raise FloatingPointError(
                f"loss is {result.loss} and the gradient's norm {result.grad_norm} at step "
                f"{context.global_step + 1}: lower training.learning_rate, or look at the data"
            )
        return result

    def window_reduce_of(self, window: list[TrainBatch], ctx: StepContext) -> WindowReduce:
        """Return the reduction to the window's sums: by a look-ahead pass, unless a micro-batch is the whole window.

        Collective over the ranks, here or in the loss.
        """
        strategy = self.strategy
        assert isinstance(strategy, DSpineTrainStrategy)
        if not strategy.inner.reads_window:
            return identity
        if len(window) == 1:
            return self.sum_over_ranks
        sums = torch.stack([strategy.look_ahead(batch, ctx) for batch in window]).sum(dim=0)
        total = self.sum_over_ranks(sums)
        return lambda _sums: total

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Return Σ over ranks of ``sums`` [4]."""
        total = sums.clone()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            group = getattr(getattr(self.backend, "parallel_config", None), "fsdp_process_group", None)
            dist.all_reduce(total, group=group)
        return total

    def _normalize_gradients(self, local_denominator: Tensor) -> None:
        """Σ numerators' gradients / Σ W; where Σ W is 0 they are 0 already, and SpecForge would end the run."""
        try:
            super()._normalize_gradients(local_denominator)
        except ValueError:  # on all ranks: Σ W is reduced before it is checked
            logger.warning("nothing is supervised in this optimizer window: its gradient is zero")
