"""The module that SpecForge trains: the draft beside the target's frozen embedding and LM head.

One micro-batch: blocks and captured states → draft forward → supervised rows → objective. Only
``draft_model`` has trainable parameters, is optimized and is written to checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specforge_dspine.modeling.blocks import Blocks, draft_blocks
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel
from specforge_dspine.objective.distillation import Distill, distill
from specforge_dspine.objective.loss import Loss, WindowReduce, identity, look_ahead, objective
from specforge_dspine.objective.supervision import Rows, supervised_rows


class DSpineTrainingModel(nn.Module):
    """``draft_model`` with ``lm_head`` E [V, H] and ``embed_tokens`` [V, H], both frozen (names as FSDP looks
    for them: it leaves frozen target tables unsharded)."""

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

    def draft_blocks(
        self, input_ids: Tensor, hidden_states: Tensor, blocks: Blocks, *, with_features: bool = False
    ) -> DraftOutput:
        """The draft's forward over all blocks: ``input_ids`` [R, S], ``hidden_states`` [R, S, T·H]."""
        return draft_blocks(
            self.draft_model,
            self.embed_tokens,
            input_ids,
            hidden_states,
            blocks,
            flex=self.attention_backend == "flex_attention",
            with_features=with_features,
        )

    def rows(self, input_ids: Tensor, loss_mask: Tensor, blocks: Blocks) -> Rows:
        """The supervised rows of ``blocks``."""
        return supervised_rows(input_ids, loss_mask, blocks, int(self.draft_model.block_size), self.loss_decay_gamma)

    @property
    def reads_window(self) -> bool:
        """Does the objective depend on the rest of the optimizer window?"""
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
    ) -> Loss | Tensor:
        """W·L and W of one micro-batch, with the parts to log. ``window_reduce`` None: only its window sums,
        ΣwCE, W, W_c, W_m [4], without gradient.

        ``input_ids``, ``loss_mask`` [R, S]; ``hidden_states`` [R, S, T·H] tapped layers;
        ``target_last_hidden_states`` [R, S, H] final post-norm states; ``beta`` of the alignment's gate;
        ``window_reduce`` maps the micro-batch's sums to the window's; ``candidates`` [n, K] replaces the backbone's
        top K of every supervised row (conformance only).
        """
        draft, head = self.draft_model, self.lm_head.weight
        rows = self.rows(input_ids, loss_mask, blocks)
        if window_reduce is None:
            with torch.no_grad():
                output = self.draft_blocks(input_ids, hidden_states, blocks)
            weights = self.normalization_scope == "window"
            chunk = self.objective_chunk_blocks
            return look_ahead(
                draft, head, output, target_last_hidden_states, rows, weights=weights, chunk_blocks=chunk
            )
        output = self.draft_blocks(input_ids, hidden_states, blocks, with_features=True)
        return objective(
            draft,
            head,
            output,
            target_last_hidden_states,
            rows,
            beta=beta,
            normalization=self.normalization,
            scope=self.normalization_scope,
            chunk_blocks=self.objective_chunk_blocks,
            window_reduce=window_reduce,
            distill=self.distill,
            candidates=candidates,
        )
