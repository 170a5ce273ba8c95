"""Supervised positions (§5): the slots of blocks that the loss is taken over, and what they are compared with.

The position (block with anchor a, slot t ≥ 1) has the label ids[a + t] and the weight w = exp(−(t−1)/γ). Its
predecessor is ids[a + t − 1], whose final target state gives the teacher. It counts while the loss mask is 1 on all
of a+1..a+t: the contiguous supervised prefix of the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel


class SupervisedPositions(NamedTuple):
    """n supervised positions, ordered by sequence, block and slot. Every field is [n]."""

    sequence: Tensor  # index into R
    block: Tensor  # index into N
    slot: Tensor  # t ≥ 1
    label: Tensor  # y, a token id
    predecessor: Tensor  # the correct one, a token id
    predecessor_position: Tensor  # a + t − 1, index into S
    weight: Tensor  # w, float32


def supervised_positions(
    input_ids: Tensor, loss_mask: Tensor, blocks: Blocks, block_size: int, gamma: float | None
) -> SupervisedPositions:
    """Returns the positions of ``blocks`` that count, from ``input_ids`` and ``loss_mask`` [R, S].

    ``gamma`` None weighs all alike. Where nothing is supervised, one position of weight 0 stands in, so that every
    parameter still gets a gradient.
    """
    length = input_ids.shape[1]
    slots = torch.arange(1, block_size, device=input_ids.device)
    tokens = blocks.anchors.unsqueeze(-1) + slots  # [R, N, M]
    inside = (tokens < length) & blocks.keep.unsqueeze(-1)
    masked = loss_mask.gather(1, tokens.clamp(max=length - 1).flatten(1)).reshape(tokens.shape) > 0
    counts = (masked & inside).long().cumprod(dim=-1).bool()
    empty = ~counts.any()
    if empty:
        counts[0, 0, 0] = True
    sequence, block, column = counts.nonzero(as_tuple=True)
    label_at = tokens[sequence, block, column].clamp(max=length - 1)
    before = (label_at - 1).clamp(min=0)
    weight = torch.exp(-column / gamma) if gamma else torch.ones_like(column, dtype=torch.float32)
    return SupervisedPositions(
        sequence=sequence,
        block=block,
        slot=column + 1,
        label=input_ids[sequence, label_at],
        predecessor=input_ids[sequence, before],
        predecessor_position=before,
        weight=torch.zeros_like(weight) if empty else weight,
    )


class MicroBatch(NamedTuple):
    """What the loss of a micro-batch is computed from, at n supervised positions."""

    draft: DSpineDraftModel
    head: Tensor  # E [V, H], frozen
    teacher: Tensor  # the target's final states [R·S, H], detached
    positions: SupervisedPositions
    teacher_index: Tensor  # [n], into ``teacher``
    hidden: Tensor  # norm(h_L) [n, H]
    pre_injection: Tensor  # u_L [n, H]
    features: Tensor  # of every layer, for the alignment [n, L, r or H]; [n, 0] without
    chunk: int  # positions whose logits exist at a time; 0: all


def gather_positions(
    draft: DSpineDraftModel,
    head: Tensor,
    output: DraftOutput,
    last_hidden: Tensor,
    positions: SupervisedPositions,
    chunk: int = 0,
) -> MicroBatch:
    """Gather the draft's ``output`` and the teacher's states, of ``last_hidden`` [R, S, H], at ``positions``."""
    where = (positions.sequence, positions.block, positions.slot)
    features = output.hidden.new_zeros(len(positions.label), 0)
    if output.features is not None:
        features = output.features[:, *where].transpose(0, 1)
    return MicroBatch(
        draft=draft,
        head=head,
        teacher=last_hidden.detach().flatten(0, 1),  # everything from the target is detached
        positions=positions,
        teacher_index=positions.sequence * last_hidden.shape[1] + positions.predecessor_position,
        hidden=output.hidden[where],
        pre_injection=output.pre_injection[where],
        features=features,
        chunk=chunk,
    )


def weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """``total`` / ``weight``, and 0 where nothing was counted."""
    safe = torch.where(weight > 0, weight, torch.ones_like(weight))
    return torch.where(weight > 0, total / safe, torch.zeros_like(total))
