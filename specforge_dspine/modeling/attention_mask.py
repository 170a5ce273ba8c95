"""Attention masks of the block drafter (§2).

A query of slot t in the block with anchor a sees context positions strictly below a, and slots 0..t of its own block
(in DFlash's bidirectional blocks: all of its slots). It never sees another block. A padding block sees nothing.
Keys are ordered context first (S), then all blocks (N·B); queries are all blocks (N·B).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Any, Tensor, Tensor], Tensor]


def block_mask_mod(anchors: Tensor, keep: Tensor, context: int, block: int, *, causal: bool) -> MaskMod:
    """The rule as FlexAttention's ``mask_mod(batch, head, query, key)``, for ``anchors`` and ``keep`` [R, N].

    FlexAttention rounds lengths up to tiles: a query past the last block sees nothing.
    """
    count = anchors.shape[1]

    def mask_mod(batch: Tensor, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        index = (query // block).clamp(max=count - 1)
        sees_context = (key < context) & (key < anchors[batch, index])
        sees_block = (key >= context) & ((key - context) // block == query // block)
        if causal:
            sees_block = sees_block & ((key - context) % block <= query % block)
        return (sees_context | sees_block) & keep[batch, index] & (query < count * block)

    return mask_mod


def block_mask(anchors: Tensor, keep: Tensor, context: int, block: int, *, causal: bool) -> Tensor:
    """The rule as a dense mask [R, 1, N·B, S + N·B] (True: may attend), for ``anchors`` and ``keep`` [R, N]."""
    (sequences, count), device = anchors.shape, anchors.device
    batch = torch.arange(sequences, device=device)[:, None, None, None]
    query = torch.arange(count * block, device=device)[:, None]
    key = torch.arange(context + count * block, device=device)
    return block_mask_mod(anchors, keep, context, block, causal=causal)(batch, None, query, key)


def flex_block_mask(anchors: Tensor, keep: Tensor, context: int, block: int, *, causal: bool) -> Any:
    """The rule as a FlexAttention ``BlockMask`` on a GPU, for ``anchors`` and ``keep`` [R, N]."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod, (sequences, count) = block_mask_mod(anchors, keep, context, block, causal=causal), anchors.shape
    queries, keys = count * block, context + count * block
    return create_block_mask(mask_mod, B=sequences, H=None, Q_LEN=queries, KV_LEN=keys, device=anchors.device)
