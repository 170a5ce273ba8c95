"""Block-causal masks: the dense reference against the rule, and FlexAttention's against the reference."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_mask

from specforge_dspine.modeling.attention_mask import block_mask, block_mask_mod

ANCHORS = torch.tensor([[0, 4, 6], [3, 9, 0]])
KEEP = torch.tensor([[True, True, True], [True, True, False]])
S, B = 11, 4


def test_dense_mask_is_the_rule() -> None:
    mask = block_mask(ANCHORS, KEEP, S, B, causal=True)
    assert mask.shape == (2, 1, 3 * B, S + 3 * B)
    for r in range(2):
        for n in range(3):
            for t in range(B):
                for key in range(S + 3 * B):
                    if key < S:
                        sees = key < ANCHORS[r, n]
                    else:
                        block, slot = divmod(key - S, B)
                        sees = block == n and slot <= t
                    assert mask[r, 0, n * B + t, key] == bool(sees and KEEP[r, n]), (r, n, t, key)


def test_flex_mask_equals_the_dense_one() -> None:
    mod = block_mask_mod(ANCHORS, KEEP, S, B, causal=True)
    flex = create_mask(mod, 2, 1, 3 * B, S + 3 * B, device="cpu")
    assert torch.equal(flex, block_mask(ANCHORS, KEEP, S, B, causal=True))


def test_flex_mask_sees_nothing_past_the_last_block() -> None:
    mod = block_mask_mod(ANCHORS, KEEP, S, B, causal=True)
    longer = create_mask(mod, 2, 1, 3 * B + 5, S + 3 * B, device="cpu")
    assert not longer[:, :, 3 * B :].any()
