"""The draft at work: proposals round by round over a growing context, or at all anchors of a known sequence.

``BlockDrafter`` keeps the keys and values that every draft layer makes of the target's features (``DynamicCache``);
those of the block itself are dropped after each round. So a round computes the newly accepted tokens and its block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from specforge_dspine.decoding.proposal import Proposal, propose
from specforge_dspine.decoding.sampling import GREEDY, Sampling
from specforge_dspine.modeling.attention_mask import block_mask
from specforge_dspine.modeling.blocks import Blocks, forward_blocks
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel


class BlockDrafter:
    """A draft with the target's tables ``head`` E [V, H] and ``embedding`` [V, H], for one sequence at a time.

    With ``refine`` False it proposes the backbone's own choices, as a draft without refinement always does.
    """

    def __init__(self, draft: DSpineDraftModel, head: Tensor, embedding: Tensor, *, refine: bool = True) -> None:
        self.draft, self.head, self.embedding = draft.eval(), head, embedding
        self.refine = refine and draft.settings.refinement
        self.context = DynamicCache()

    @property
    def proposals(self) -> int:
        """M."""
        return int(self.draft.block_size) - 1

    def restart(self) -> None:
        """Forget the context; a new sequence begins."""
        self.context = DynamicCache()

    def propose(self, anchor: Tensor, taps: Tensor, sampling: Sampling, generator: torch.Generator) -> Proposal:
        """Propose tokens [M] after ``anchor`` x_0 [], given the features ``taps`` [n, T·H] of the n new tokens below
        it."""
        out = self.block(anchor, taps)
        states = (out.hidden[0, 0], out.pre_injection[0, 0])
        return propose(self.draft, self.head, *states, anchor, sampling, generator, refine=self.refine)

    def block(self, anchor: Tensor, taps: Tensor) -> DraftOutput:
        """Run the backbone over one block: states [1, 1, B, H]; arguments as for ``propose``."""
        draft, device = self.draft, taps.device
        known = self.context.get_seq_length()
        length, block = known + len(taps), self.proposals + 1  # the anchor's position; B
        ids = torch.full((1, block), draft.mask_token_id, dtype=torch.long, device=device)
        ids[0, 0] = anchor
        start = torch.full((1, 1), length, device=device)
        out: DraftOutput = draft(
            position_ids=torch.arange(known, length + block, device=device)[None],
            attention_mask=block_mask(start, start >= 0, length, block, causal=draft.settings.causal),
            noise_embedding=self.embedding[ids],
            target_hidden=taps[None].to(self.embedding.dtype),
            predecessor_ids=anchor.expand(1, 1, self.proposals),  # slot 1's; the others read their neighbor's state
            past_key_values=self.context,
        )
        self.context.crop(length)
        return out


@torch.inference_mode()
def draft_all_anchors(drafter: BlockDrafter, ids: Tensor, taps: Tensor, anchors: Tensor) -> Proposal:
    """Propose greedily [N, M] at ``anchors`` [N] of a known sequence ``ids`` [S] with features ``taps`` [S, T·H]."""
    keep = torch.ones(1, len(anchors), dtype=torch.bool, device=ids.device)
    blocks = Blocks(anchors=anchors[None], keep=keep, replaced=~keep)
    features = taps[None].to(drafter.embedding.dtype)
    out = forward_blocks(drafter.draft, lambda known: drafter.embedding[known], ids[None], features, blocks)
    states = (out.hidden[0], out.pre_injection[0])
    return propose(drafter.draft, drafter.head, *states, ids[anchors], GREEDY, refine=drafter.refine)
