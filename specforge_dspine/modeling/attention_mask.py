"""Attention masks of the block drafter (§2).

A query of slot t in the block with anchor a sees context positions strictly below a, and slots 0..t of its
own block (DFlash's bidirectional blocks: all of its slots); never another block. A padding block sees nothing
and is seen by nothing. Keys are ordered context first (S), then all blocks (N·B); queries are all blocks (N·B).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def block_mask(anchors: Tensor, keep: Tensor, context: int, block: int, *, causal: bool) -> Tensor:
    """Dense mask [R, 1, N·B, S + N·B] (True: may attend) for ``anchors`` [R, N] and ``keep`` [R, N] (bool)."""
    device = anchors.device
    count = anchors.shape[1]
    sees_context = torch.arange(context, device=device) < anchors[:, :, None, None]  # [R, N, 1, S]
    slot = torch.arange(block, device=device)
    same_block = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None]  # [N, 1, N, 1]
    order = slot[None, None, None, :] <= slot[None, :, None, None]  # [1, B, 1, B]
    sees_block = same_block & (order if causal else torch.ones_like(order))  # [N, B, N, B]
    mask = torch.cat(
        [
            sees_context.expand(-1, -1, block, -1),
            sees_block.reshape(1, count, block, count * block).expand(len(anchors), -1, -1, -1),
        ],
        dim=-1,
    )
    mask = mask & keep[:, :, None, None]
    return mask.reshape(len(anchors), 1, count * block, context + count * block)


def flex_block_mask(anchors: Tensor, keep: Tensor, context: int, block: int, *, causal: bool) -> Any:
    """The same mask as a FlexAttention ``BlockMask``, for ``anchors`` [R, N] and ``keep`` [R, N] on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, count = anchors.shape
    return create_block_mask(
        block_mask_mod(anchors, keep, context, block, causal=causal),
        B=rows,
        H=None,
        Q_LEN=count * block,
        KV_LEN=context + count * block,
        device=anchors.device,
    )


def block_mask_mod(anchors: Tensor, keep: Tensor, context: int, block: int, *, causal: bool) -> Any:
    """``mask_mod(batch, head, query, key)`` of ``block_mask`` for FlexAttention.

    Lengths are rounded up to tiles there, so that a query may lie past the last block: it sees nothing.
    """
    count = anchors.shape[1]

    def mask_mod(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = (query // block).clamp(max=count - 1)
        sees_context = (key < context) & (key < anchors[batch, index])
        own = (key - context) // block == query // block
        sees_block = (key >= context) & own
        if causal:
            sees_block = sees_block & ((key - context) % block <= query % block)
        return (sees_context | sees_block) & keep[batch, index] & (query < count * block)

    return mask_mod
