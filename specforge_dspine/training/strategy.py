"""Step strategy of SpecForge for DSpine: one micro-batch of captured features → numerator and denominator (§5).

The schedules (β, p) and the draws of blocks happen here; the model and the objective know nothing of steps.
"""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

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
from specforge_dspine.utils.errors import RecipeError, RunError

logger = logging.getLogger(__name__)

FEATURES = frozenset({"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"})
EPOCH = re.compile(r"^e\d+-")  # of a sample's id: trainers.py names it for its epoch
MAX_BAD_SAMPLES = 64  # samples with non-finite states that are left out before a run stops


class DSpineTrainStrategy(DraftTrainStrategy):
    """Draws blocks, calls the model, reports sums and counts.

    The loss is (numerator, denominator), which SpecForge sums over the optimizer window and all ranks. ``seed`` is
    the run's, ``warmup_ratio`` the learning rate's warm-up as a fraction of all steps.
    """

    name = ALGORITHM
    required_features: ClassVar[set[str]] = set(FEATURES)

    def __init__(self, model: torch.nn.Module, *, seed: int, warmup_ratio: float) -> None:
        self.model = model
        self.seed, self.warmup_ratio = seed, warmup_ratio
        # Under DDP or FSDP the wrapper owns the forward; sizes and settings are the module's inside.
        inner = model if isinstance(model, DSpineTrainingModel) else model.module
        assert isinstance(inner, DSpineTrainingModel)
        self.inner = inner
        self.bad_samples: set[str] = set()

    def trainable_module(self) -> torch.nn.Module:
        """Return the wrapped training model: SpecForge's seam."""
        return self.model

    def forward_loss(self, batch: TrainBatch, ctx: StepContext | None = None) -> StepOutput:
        """Return the loss of ``batch``, and what the step reports.

        Args:
            batch: input_ids, loss_mask [R, S]; hidden_states [R, S, T·H]; target_last_hidden_states [R, S, H].
            ctx: optimizer steps taken and planned; in training also the reduction over the optimizer window.
        """
        inputs, blocks, probability = self.inputs(batch, ctx)
        loss = self.model(**inputs, window_reduce=getattr(ctx, "window_reduce", identity))
        kept, one = blocks.keep.sum(), torch.tensor(1.0)
        settings = self.inner.draft_model.settings
        parts = {
            "beta": (torch.tensor(inputs["beta"]), one),
            "replacement_probability": (torch.tensor(probability), one),
            "replaced_share": ((blocks.replaced & blocks.keep).sum(), kept),
            "blocks": (kept, one),
            "supervised_tokens": (batch.tensors["loss_mask"].sum(), one),
        }
        parts = loss.parts | {name: pair for name, pair in parts.items() if is_reported(name, settings)}
        mean = loss.numerator.detach() / loss.denominator.clamp_min(1e-12)
        return StepOutput(loss=mean, metrics={}, ratio_metrics=parts, loss_terms=(loss.numerator, loss.denominator))

    def look_ahead(self, batch: TrainBatch, ctx: StepContext) -> Tensor:
        """Return ΣwCE, W, W_c, W_m [4] of ``batch``, with the draws that ``forward_loss`` will repeat."""
        inputs, *_ = self.inputs(batch, ctx)
        with torch.no_grad():
            total: Tensor = self.model(**inputs, window_reduce=None)
        return total

    def inputs(self, batch: TrainBatch, ctx: StepContext | None) -> tuple[dict[str, Any], Blocks, float]:
        """Return the model's arguments for ``batch`` on its device, the blocks as drawn, and the curriculum's p."""
        self.validate_batch(batch)
        self.leave_out_bad_samples(batch)
        if ctx is None or not ctx.total_steps:
            raise ValueError("total_steps is unknown: the curriculum and the gate need a schedule's horizon")
        settings = self.inner.draft_model.settings
        step, total = ctx.global_step, ctx.total_steps
        warmup = settings.alignment_warmup_steps
        beta = alignment_beta(step, int(self.warmup_ratio * total) if warmup is None else warmup, settings)
        probability = replacement_probability(step, total, settings) if self.model.training else 0.0
        blocks = draw_blocks(
            batch.tensors["loss_mask"],
            batch.sample_ids,
            seed=self.seed,
            num_anchors=self.inner.num_anchors,
            probability=probability,
        )
        device = self.inner.lm_head.weight.device
        tensors = {name: batch.tensors[name].to(device, non_blocking=True) for name in sorted(FEATURES)}
        return {**tensors, "blocks": blocks.to(device), "beta": beta}, blocks, probability

    def validate_batch(self, batch: TrainBatch) -> None:
        """Check the features' names, as SpecForge does, and their widths and dtypes by target and taps."""
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
        """Make samples whose states are not finite supervise nothing; name each, and count it once in all epochs."""
        for name in ("hidden_states", "target_last_hidden_states"):
            states = batch.tensors[name]
            for row in (~torch.isfinite(states).flatten(1).all(dim=1)).nonzero().flatten().tolist():
                logger.warning("left out: %s of sample %s is not finite", name, batch.sample_ids[row])
                self.bad_samples.add(EPOCH.sub("", batch.sample_ids[row]))
                for feature in ("hidden_states", "target_last_hidden_states", "loss_mask"):
                    batch.tensors[feature][row] = 0
        if len(self.bad_samples) > MAX_BAD_SAMPLES:
            raise RunError(
                f"{len(self.bad_samples)} samples were not finite (at most {MAX_BAD_SAMPLES} are left out), "
                f"{sorted(self.bad_samples)[-1]} among them; capture the features again"
            )

    def checkpoint_state_filter(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep the draft's own tensors, named as in the exported checkpoint."""
        prefix = "draft_model."
        return {k.split(prefix, 1)[1]: v for k, v in state_dict.items() if prefix in k}
