"""Side branches of a sequence: at each of N anchors the draft's own proposals beside the right continuation.

    context    ids_0 .. ids_{S−1}, then per anchor a_n its branch x̂_1 .. x̂_M at positions a_n + 1 .. a_n + M
    target     reads all of it in one forward; a branch attends to ids up to its anchor, and causally to itself
    draft      a block whose anchor is t tokens after a_n attends to the right history, ids below a_n + t, or to
               the predicted one: ids up to a_n, then x̂_1 .. x̂_{t−1}, as the target encodes them there

Right and predicted history are two masks over the same keys, so that every layer can get its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specforge_dspine.modeling.attention_mask import block_mask
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel


@dataclass(frozen=True)
class Branches:
    """``ids`` [S], ``anchors`` [N], the draft's proposals ``tokens`` [N, M], and the target's states ``taps``
    [S + N·M, T·H] over the context."""

    ids: Tensor
    anchors: Tensor
    tokens: Tensor
    taps: Tensor

    def label(self, offset: Tensor) -> Tensor:
        """Right tokens [N, n] at ``offset`` [N, n] from each anchor."""
        return self.ids[self.anchors[:, None] + offset]


def context_positions(ids: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
    """Positions [S + N·M] of a sequence ``ids`` [S] and the branches ``tokens`` [N, M] of its ``anchors`` [N]."""
    steps = torch.arange(1, tokens.shape[1] + 1, device=ids.device)
    return torch.cat([torch.arange(len(ids), device=ids.device), (anchors[:, None] + steps).flatten()])


@torch.inference_mode()
def encode(model: Any, layers: Sequence[int], ids: Tensor, anchors: Tensor, tokens: Tensor) -> Branches:
    """Encode ``ids`` [S] with the branches ``tokens`` [N, M] of ``anchors`` [N] by the target ``model``.

    ``model`` is a causal LM of transformers; ``layers`` are tapped.
    """
    length, (count, proposals) = len(ids), tokens.shape
    order = torch.arange(length, device=ids.device)
    sequence = torch.cat([order[:, None] >= order, order.new_zeros(length, count * proposals, dtype=torch.bool)], 1)
    owner = torch.arange(count, device=ids.device).repeat_interleave(proposals)
    step = torch.arange(proposals, device=ids.device).repeat(count)
    own = (owner[:, None] == owner) & (step[:, None] >= step)
    branches = torch.cat([order <= anchors[owner, None], own], dim=1)
    visible = torch.cat([sequence, branches])  # [S + N·M, S + N·M]
    mask = torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
    out = model(
        torch.cat([ids, tokens.flatten()])[None],
        attention_mask=mask[None, None],
        position_ids=context_positions(ids, anchors, tokens)[None],
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=1,
    )
    taps = torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    return Branches(ids, anchors, tokens, taps)


def history(branches: Branches, owner: Tensor, offset: Tensor, *, predicted: bool) -> Tensor:
    """Visible context [Q, S + N·M] (bool) of Q blocks: the right history, or the predicted one.

    Block q's anchor is ``offset`` [Q] tokens after the anchor number ``owner`` [Q].
    """
    anchors = branches.anchors[owner]
    order = torch.arange(len(branches.ids), device=owner.device)
    until = anchors + (offset.clamp(max=1) if predicted else offset)
    right = order < until[:, None]
    count, proposals = branches.tokens.shape
    step = torch.arange(1, proposals + 1, device=owner.device)
    own = torch.arange(count, device=owner.device) == owner[:, None]
    branch = own[:, :, None] & (step < offset[:, None, None]) & predicted
    return torch.cat([right, branch.flatten(1)], dim=1)


def block_view(context: Tensor, block: int, *, causal: bool) -> Tensor:
    """Mask [1, 1, Q·B, C + Q·B] of Q blocks of B = ``block`` slots that see ``context`` [Q, C] and themselves."""
    nowhere = torch.zeros(1, len(context), dtype=torch.long, device=context.device)
    inside = block_mask(nowhere, nowhere == 0, 0, block, causal=causal)
    return torch.cat([context.repeat_interleave(block, 0)[None, None], inside], dim=-1)


@torch.inference_mode()
def draft_from(
    draft: DSpineDraftModel, embedding: Tensor, branches: Branches, positions: Tensor, tokens: Tensor, mask: Tensor
) -> DraftOutput:
    """The draft's forward over Q blocks with the anchors ``tokens`` [Q] at ``positions`` [Q]: states [1, Q, B, H].

    ``mask`` comes from ``block_view``; ``embedding`` [V, H] is the target's.
    """
    count = len(tokens)
    block = mask.shape[2] // count
    ids = torch.full((count, block), draft.mask_token_id, dtype=torch.long, device=tokens.device)
    ids[:, 0] = tokens
    slots = positions[:, None] + torch.arange(block, device=tokens.device)
    context = context_positions(branches.ids, branches.anchors, branches.tokens)
    output: DraftOutput = draft(
        position_ids=torch.cat([context, slots.flatten()])[None],
        attention_mask=mask,
        noise_embedding=embedding[ids.flatten()][None],
        target_hidden=branches.taps[None].to(embedding.dtype),
        predecessor_ids=tokens[:, None].expand(count, block - 1)[None],
    )
    return output
