"""SpecForge's training step for DSpine: one micro-batch of captured features → the objective's numerator and weight.

The schedules (β, p) and the blocks' draws of §5 happen here; the model and the objective know nothing of steps.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import DraftTrainStrategy, StepContext, StepOutput
from torch import Tensor

from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.objective.alignment_gate import alignment_beta
from specforge_dspine.objective.curriculum import draw_blocks, replacement_probability
from specforge_dspine.objective.loss import identity
from specforge_dspine.objective.metrics import is_reported
from specforge_dspine.objective.training_model import DSpineTrainingModel
from specforge_dspine.training.recipe import ALGORITHM
from specforge_dspine.utils.errors import RecipeError

logger = logging.getLogger(__name__)

FEATURES = frozenset({"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"})
EPOCH = re.compile(r"^e\d+-")  # of a sample's id: assembly.py names it for its epoch
MAX_BAD_SAMPLES = 64  # samples with non-finite states that are left out before a run stops


@dataclass(frozen=True)
class Schedule:
    """What the step needs to know of the run: its ``seed`` and the learning rate's warm-up as a fraction."""

    seed: int
    warmup_ratio: float


class Draws(NamedTuple):
    """What a step drew and scheduled for a micro-batch: its ``blocks``, p as ``chance``, and β."""

    blocks: Blocks
    chance: float
    beta: float


class DSpineTrainStrategy(DraftTrainStrategy):
    """One micro-batch → loss: draws its blocks, asks the model, reports sums and counts.

    The loss goes out as (numerator, denominator), which SpecForge sums over the optimizer window and all ranks.
    """

    name = ALGORITHM
    required_features: ClassVar[set[str]] = set(FEATURES)

    def __init__(self, model: torch.nn.Module, schedule: Schedule) -> None:
        self.model = model
        self.schedule = schedule
        # Under DDP or FSDP the wrapper owns the forward; sizes and settings are the module's inside.
        inner = model if isinstance(model, DSpineTrainingModel) else model.module
        assert isinstance(inner, DSpineTrainingModel)
        self.inner = inner
        self.bad_samples: set[str] = set()

    def trainable_module(self) -> torch.nn.Module:
        """SpecForge's seam: the wrapped composite model."""
        return self.model

    def forward_loss(self, batch: TrainBatch, ctx: StepContext | None = None) -> StepOutput:
        """``batch.tensors``: input_ids, loss_mask [R, S]; hidden_states [R, S, T·H]; target_last_hidden_states
        [R, S, H]. ``ctx`` gives the optimizer steps taken and planned, and in training the micro-batch's share of its
        window (window.py); outside training nothing is replaced.

        Raises:
            ValueError: a feature is missing, or the schedule's horizon is unknown.
        """
        inputs, draws = self.inputs(batch, ctx)
        loss = self.model(**inputs, window_reduce=getattr(ctx, "window_reduce", identity))
        kept, one = draws.blocks.keep.sum(), torch.tensor(1.0)
        settings = self.inner.draft_model.settings
        parts = {
            "beta": (torch.tensor(draws.beta), one),
            "replacement_probability": (torch.tensor(draws.chance), one),
            "replaced_share": ((draws.blocks.replaced & draws.blocks.keep).sum(), kept),
            "blocks": (kept, one),
            "supervised_tokens": (batch.tensors["loss_mask"].sum(), one),
        }
        parts = loss.parts | {name: pair for name, pair in parts.items() if is_reported(name, settings)}
        mean = loss.numerator.detach() / loss.denominator.clamp_min(1e-12)
        return StepOutput(loss=mean, metrics={}, ratio_metrics=parts, loss_terms=(loss.numerator, loss.denominator))

    def look_ahead(self, batch: TrainBatch, ctx: StepContext) -> Tensor:
        """ΣwCE, W, W_c, W_m [4] of ``batch``, with the draws that ``forward_loss`` will make again.

        Raises:
            ValueError: as ``forward_loss``.
        """
        inputs, _ = self.inputs(batch, ctx)
        with torch.no_grad():
            total: Tensor = self.model(**inputs, window_reduce=None)
        return total

    def inputs(self, batch: TrainBatch, ctx: StepContext | None) -> tuple[dict[str, Any], Draws]:
        """The model's arguments for ``batch`` at this step, on its device, and what was drawn for them."""
        self.validate_batch(batch)
        self.leave_out_bad_samples(batch)
        if ctx is None or not ctx.total_steps:
            raise ValueError("total_steps is unknown: the curriculum and the gate need a schedule's horizon")
        settings = self.inner.draft_model.settings
        step, total = ctx.global_step, ctx.total_steps
        warmup = settings.alignment_warmup_steps
        beta = alignment_beta(step, int(self.schedule.warmup_ratio * total) if warmup is None else warmup, settings)
        chance = replacement_probability(step, total, settings) if self.model.training else 0.0
        blocks = draw_blocks(
            batch.tensors["loss_mask"],
            batch.sample_ids,
            seed=self.schedule.seed,
            num_anchors=self.inner.num_anchors,
            probability=chance,
        )
        device = self.inner.lm_head.weight.device
        tensors = {name: batch.tensors[name].to(device, non_blocking=True) for name in sorted(FEATURES)}
        return {**tensors, "blocks": blocks.to(device), "beta": beta}, Draws(blocks, chance, beta)

    def validate_batch(self, batch: TrainBatch) -> None:
        """SpecForge checks names; the widths of DFlash-family features are ours to check.

        Raises:
            RecipeError: a feature of another width or dtype than this target and these taps give.
            ValueError: a feature is missing.
        """
        super().validate_batch(batch)
        taps, hidden = self.inner.draft_model.fc.in_features, self.inner.draft_model.fc.out_features
        for name, width in (("hidden_states", taps), ("target_last_hidden_states", hidden)):
            value = batch.tensors[name]
            if value.shape[-1] != width or value.dtype != self.inner.lm_head.weight.dtype:
                raise RecipeError(
                    f"{name} of {batch.sample_ids} is {value.shape[-1]} wide in {value.dtype}; this target and "
                    f"dspine.target_layer_ids give {width} in {self.inner.lm_head.weight.dtype}: capture it again"
                )

    def leave_out_bad_samples(self, batch: TrainBatch) -> None:
        """Samples whose states are not finite supervise nothing: named, counted once in all epochs, and tolerated up
        to a limit.

        Raises:
            RuntimeError: more than ``MAX_BAD_SAMPLES`` of them.
        """
        for name in ("hidden_states", "target_last_hidden_states"):
            states = batch.tensors[name]
            for row in (~torch.isfinite(states).flatten(1).all(dim=1)).nonzero().flatten().tolist():
                logger.warning("left out: %s of sample %s is not finite", name, batch.sample_ids[row])
                self.bad_samples.add(EPOCH.sub("", batch.sample_ids[row]))
                for feature in ("hidden_states", "target_last_hidden_states", "loss_mask"):
                    batch.tensors[feature][row] = 0
        if len(self.bad_samples) > MAX_BAD_SAMPLES:
            raise RuntimeError(
                f"{len(self.bad_samples)} samples were not finite (at most {MAX_BAD_SAMPLES} are left out), "
                f"{sorted(self.bad_samples)[-1]} among them; capture the features again"
            )

    def checkpoint_state_filter(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The draft's own tensors, names as in the exported checkpoint."""
        prefix = "draft_model."
        return {k.split(prefix, 1)[1]: v for k, v in state_dict.items() if prefix in k}
