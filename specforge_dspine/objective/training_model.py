"""The module that SpecForge trains: the draft beside the target's frozen embedding and LM head.

One micro-batch: blocks and captured states → draft forward → supervised positions → loss. Only ``draft_model`` has
trainable parameters, is optimized and is written to checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specforge_dspine.modeling.blocks import Blocks, forward_blocks
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel
from specforge_dspine.objective.alignment_gate import alignment_sums
from specforge_dspine.objective.distillation import Distill, backbone_sums, distill
from specforge_dspine.objective.loss import LossTerms, WindowReduce, identity, look_ahead, normalize
from specforge_dspine.objective.metrics import accuracy_parts
from specforge_dspine.objective.refinement import refinement_sums
from specforge_dspine.objective.supervision import gather_positions, supervised_positions


class DSpineTrainingModel(nn.Module):
    """``draft_model`` with ``lm_head`` E [V, H] and ``embed_tokens`` [V, H], both frozen.

    FSDP looks for these names and leaves the target's tables unsharded.
    """

    def __init__(
        self,
        draft_model: DSpineDraftModel,
        target_lm_head: nn.Linear,
        target_embed_tokens: nn.Embedding,
        *,
        attention_backend: str,
        num_anchors: int,
        loss_decay_gamma: float | None,
        objective_chunk_blocks: int,
        normalization: str,
        normalization_scope: str = "microbatch",
    ) -> None:
        super().__init__()
        self.draft_model = draft_model
        self.lm_head = target_lm_head.requires_grad_(False)
        self.embed_tokens = target_embed_tokens.requires_grad_(False)
        self.attention_backend = attention_backend
        self.num_anchors = num_anchors
        self.loss_decay_gamma = loss_decay_gamma
        self.objective_chunk_blocks = objective_chunk_blocks
        self.normalization = normalization
        self.normalization_scope = normalization_scope
        self.distill: Distill = distill

    def forward_blocks(
        self, input_ids: Tensor, hidden_states: Tensor, blocks: Blocks, *, with_features: bool = False
    ) -> DraftOutput:
        """The draft's forward over all blocks: ``input_ids`` [R, S], ``hidden_states`` [R, S, T·H]."""
        flex, embed = self.attention_backend == "flex_attention", self.embed_tokens
        return forward_blocks(
            self.draft_model, embed, input_ids, hidden_states, blocks, flex=flex, with_features=with_features
        )

    @property
    def reads_window(self) -> bool:
        """Whether the loss depends on the rest of the optimizer window."""
        return self.draft_model.settings.alignment != "off" or self.normalization_scope == "window"

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        hidden_states: Tensor,
        target_last_hidden_states: Tensor,
        blocks: Blocks,
        beta: float,
        window_reduce: WindowReduce | None = identity,
        candidates: Tensor | None = None,
    ) -> LossTerms | Tensor:
        """Returns W·L and W of one micro-batch, with the parts to log.

        At most ``objective_chunk_blocks`` blocks' logits exist at a time, whatever N is; 0 keeps all at once.

        Args:
            input_ids: [R, S], as ``loss_mask``.
            hidden_states: [R, S, T·H], the tapped layers' outputs.
            target_last_hidden_states: [R, S, H], final and post-norm.
            beta: β of the alignment's gate.
            window_reduce: the micro-batch's sums → its window's. None: return only the micro-batch's own, [4] and
                without gradient (the look-ahead pass).
            candidates: [n, K], replaces the backbone's top K of every supervised position (conformance only).
        """
        settings, block_size = self.draft_model.settings, int(self.draft_model.block_size)
        positions = supervised_positions(input_ids, loss_mask, blocks, block_size, self.loss_decay_gamma)
        training = window_reduce is not None  # else the look-ahead pass: no gradient, no features
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            output = self.forward_blocks(input_ids, hidden_states, blocks, with_features=training)
        head, chunk = self.lm_head.weight, self.objective_chunk_blocks * (block_size - 1)
        batch = gather_positions(self.draft_model, head, output, target_last_hidden_states, positions, chunk)
        if window_reduce is None:
            return look_ahead(batch, weights=self.normalization_scope == "window")
        backbone, correct, chosen = backbone_sums(batch, self.distill, candidates)
        refinement, refined_correct = refinement_sums(batch, chosen)
        sums = {**backbone, **refinement, "align": alignment_sums(batch)}
        loss = normalize(sums, settings, self.normalization, self.normalization_scope, beta, window_reduce)
        outputs = {"": correct} | ({"refined_": refined_correct} if settings.refinement else {})
        loss.parts.update(accuracy_parts(positions, (*blocks.anchors.shape, block_size - 1), outputs))
        return loss
