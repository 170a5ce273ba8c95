"""Blocks of a micro-batch, and the draft's forward over all of them (§2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specforge_dspine.modeling.attention_mask import block_mask, flex_block_mask
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel


class Blocks(NamedTuple):
    """Blocks of a micro-batch, each field [R, N]."""

    anchors: Tensor  # positions, ascending; 0 where padding
    keep: Tensor  # bool: False where padding
    replaced: Tensor  # bool: receives correct predecessors (the curriculum)

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on ``device``."""
        return Blocks(*(value.to(device, non_blocking=True) for value in self))


def forward_blocks(
    draft: DSpineDraftModel,
    embed: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    hidden_states: Tensor,
    blocks: Blocks,
    *,
    flex: bool = False,
    with_features: bool = False,
) -> DraftOutput:
    """Run the draft over all ``blocks`` of ``input_ids`` [R, S], with the tapped states [R, S, T·H].

    ``embed`` is the target's embedding; ``flex`` builds the mask for FlexAttention.
    """
    (sequences, length), block, device = input_ids.shape, int(draft.block_size), input_ids.device
    anchors, slots = blocks.anchors, torch.arange(block, device=device)
    # Slot 0 holds the anchor token, all others the mask token.
    ids = torch.full((*anchors.shape, block), draft.mask_token_id, dtype=torch.long, device=device)
    ids[..., 0] = torch.where(blocks.keep, input_ids.gather(1, anchors), draft.mask_token_id)
    context_positions = torch.arange(length, device=device).expand(sequences, -1)
    block_positions = (anchors.unsqueeze(-1) + slots).flatten(1)
    before = (anchors.unsqueeze(-1) + slots[:-1]).clamp(max=length - 1)  # of slots 1..M: a + t − 1
    build_mask: Callable[..., Any] = flex_block_mask if flex else block_mask
    output: DraftOutput = draft(
        position_ids=torch.cat([context_positions, block_positions], dim=1),
        attention_mask=build_mask(anchors, blocks.keep, length, block, causal=draft.settings.causal),
        noise_embedding=embed(ids.flatten(1)),
        target_hidden=hidden_states,
        predecessor_ids=input_ids.gather(1, before.flatten(1)).reshape(before.shape),
        replaced=blocks.replaced,
        with_features=with_features,
    )
    return output
