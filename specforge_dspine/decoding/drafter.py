"""A draft at work: one block after the other on a context that grows, each context token computed once.

The keys and values that every draft layer makes of the target's features are kept from round to round
(``DynamicCache``); those of a block, anchor and mask tokens, are dropped with it. So a round costs the tokens that
the one before accepted, and its own block.

Where the answer is known already, ``ReplayDrafter`` drafts the blocks of all anchors in a few forwards instead: the
same proposals, several times sooner, for a forward over one block is too small to use the processor.
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

AT_ONCE = 64  # blocks of one forward


class BlockDrafter:
    """``draft`` between the target's tables ``head`` E [V, H] and ``embedding`` [V, H], for one sequence at a time.

    ``refine`` False walks over the backbone's own choices, as a draft without refinement always does.
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
        """A new sequence: forget the context."""
        self.context = DynamicCache()

    def propose(self, anchor: Tensor, taps: Tensor, sampling: Sampling, generator: torch.Generator) -> Proposal:
        """The next block's proposals, tokens [M]: ``anchor`` x_0 [] follows the context, of which the last n tokens
        are new, with their features ``taps`` [n, T·H]."""
        out = self.block(anchor, taps)
        return propose(
            self.draft,
            self.head,
            out.hidden[0, 0],
            out.pre_injection[0, 0],
            anchor,
            sampling,
            generator,
            refine=self.refine,
        )

    def block(self, anchor: Tensor, taps: Tensor) -> DraftOutput:
        """The backbone's forward over one block: states [1, 1, B, H] (see ``propose``)."""
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
            predecessor_ids=anchor.expand(1, 1, self.proposals),  # slot 1's; the others read their neighbour's state
            past_key_values=self.context,
        )
        self.context.crop(length)
        return out


class ReplayDrafter:
    """Greedy proposals of ``drafter`` along an answer that is known, ``ids`` [S] from position ``start`` on, with the
    target's states ``taps`` [S, T·H]: a ``rounds.Drafter`` for decoding just that answer."""

    def __init__(self, drafter: BlockDrafter, ids: Tensor, taps: Tensor, start: int) -> None:
        anchors = torch.arange(start, len(ids) - 1, device=ids.device)
        parts = [draft_all_anchors(drafter, ids, taps, part) for part in anchors.split(AT_ONCE) if len(part)]
        self.start, self.position = start, 0
        self.proposals = [Proposal(*row, None) for part in parts for row in zip(part.tokens, part.ids, strict=True)]

    def restart(self) -> None:
        """See ``rounds.Drafter``."""
        self.position = 0

    def propose(self, anchor: Tensor, taps: Tensor, sampling: Sampling, generator: torch.Generator) -> Proposal:
        """See ``rounds.Drafter``; the count of ``taps`` alone says where the anchor is."""
        self.position += len(taps)
        return self.proposals[self.position - self.start]


@torch.inference_mode()
def draft_all_anchors(drafter: BlockDrafter, ids: Tensor, taps: Tensor, anchors: Tensor) -> Proposal:
    """Greedy proposals [N, M] of blocks at ``anchors`` [N] of a known sequence, ``ids`` [S], ``taps`` [S, T·H]."""
    keep = torch.ones(1, len(anchors), dtype=torch.bool, device=ids.device)
    blocks = Blocks(anchors=anchors[None], keep=keep, replaced=~keep)
    states = taps[None].to(drafter.embedding.dtype)
    out = forward_blocks(drafter.draft, lambda known: drafter.embedding[known], ids[None], states, blocks)
    return propose(
        drafter.draft,
        drafter.head,
        out.hidden[0],
        out.pre_injection[0],
        ids[anchors],
        GREEDY,
        torch.Generator(ids.device),
        refine=drafter.refine,
    )
