"""Supervised rows (§5): which slots of which blocks the objective is taken over, and what they are compared with.

Row (block a, slot t ≥ 1) has the label ids[a + t], the predecessor ids[a + t − 1], whose final state is the
teacher's, and the weight w = exp(−(t−1)/γ). It counts while the loss mask is 1 on all of a+1..a+t: the contiguous
prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.modeling.draft_model import DraftOutput


class Rows(NamedTuple):
    """Supervised rows, n of them: indices ``sequence``, ``block``, ``slot`` [n] into [R, N, B] (slot ≥ 1);
    ``label`` y and ``predecessor`` token ids [n]; ``position`` [n] of the predecessor, whose final state is
    the teacher's; ``weight`` w [n], float32."""

    sequence: Tensor
    block: Tensor
    slot: Tensor
    label: Tensor
    predecessor: Tensor
    position: Tensor
    weight: Tensor


def supervised_rows(
    input_ids: Tensor, loss_mask: Tensor, blocks: Blocks, block_size: int, gamma: float | None
) -> Rows:
    """Row (block a, slot t ≥ 1), label ids[a + t], counts while ``loss_mask`` [R, S] is 1 on all of a+1..a+t
    and a + t < S: the contiguous supervised prefix. ``input_ids`` [R, S]. w = exp(−(t−1)/γ); γ None: 1.

    Where nothing is supervised, one row of weight 0 stands in, so that every parameter still gets a gradient.
    """
    length = input_ids.shape[1]
    slots = torch.arange(1, block_size, device=input_ids.device)
    positions = blocks.anchors.unsqueeze(-1) + slots  # [R, N, M]
    inside = (positions < length) & blocks.keep.unsqueeze(-1)
    flat = positions.clamp(max=length - 1).flatten(1)
    supervised = loss_mask.gather(1, flat).reshape(positions.shape) > 0
    prefix = (supervised & inside).long().cumprod(dim=-1).bool()
    empty = ~prefix.any()
    if empty:
        prefix[0, 0, 0] = True
    sequence, block, column = prefix.nonzero(as_tuple=True)
    label_at = positions[sequence, block, column].clamp(max=length - 1)
    weight = torch.exp(-column / gamma) if gamma else torch.ones_like(column, dtype=torch.float32)
    return Rows(
        sequence=sequence,
        block=block,
        slot=column + 1,
        label=input_ids[sequence, label_at],
        predecessor=input_ids[sequence, (label_at - 1).clamp(min=0)],
        position=(label_at - 1).clamp(min=0),
        weight=torch.zeros_like(weight) if empty else weight,
    )


def gathered(output: DraftOutput, rows: Rows, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: hidden, pre_injection [n, H], features [n, L, r or H] ([n, 0] without alignment), and the number [n]
    of its teacher's state.

    ``length`` S; states of [R, S, H] are numbered sequence by sequence.
    """
    where = (rows.sequence, rows.block, rows.slot)
    if output.features is None:
        features = output.hidden.new_zeros(len(rows.label), 0)
    else:
        features = output.features[:, rows.sequence, rows.block, rows.slot].transpose(0, 1)
    return output.hidden[where], output.pre_injection[where], features, rows.sequence * length + rows.position
