"""The correct-predecessor curriculum, and the draws of a micro-batch: its anchors, and the blocks to replace (§5).

    p = p_0 until 1/6 of all steps, then linearly to 0 at 1/3

A step is the number of optimizer steps already taken: the first is 0. Every draw comes from a generator keyed by
(seed, sample id), and a sample id names its epoch. So draws depend neither on the batch's composition, padding or
rank nor on the order of calls.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.modeling.settings import DSpineSettings


def replacement_probability(step: int, total_steps: int, settings: DSpineSettings) -> float:
    """p at ``step`` of ``total_steps`` optimizer steps; 0 without the curriculum."""
    if not settings.curriculum:
        return 0.0
    hold = settings.replacement_hold_ratio * total_steps
    end = settings.replacement_end_ratio * total_steps
    if step < hold:
        return settings.replacement_probability
    if step >= end:
        return 0.0
    return settings.replacement_probability * (end - step) / (end - hold)


def sample_generator(seed: int, sample_id: str) -> torch.Generator:
    """The CPU generator of one sample's draws."""
    digest = hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw_blocks(
    loss_mask: Tensor, sample_ids: list[str], *, seed: int, num_anchors: int, probability: float
) -> Blocks:
    """Draw anchors and replacement flags of a micro-batch, on the CPU.

    Anchors are uniform without replacement among positions a with ``loss_mask`` [R, S] 1 at a and a + 1, at most
    ``num_anchors`` per sequence. One Bernoulli(``probability``) draw per block decides its replacement. A batch
    without any anchor yields one padding block, so that every rank still runs its forward.
    """
    anchors, flags = [], []
    for mask, sample_id in zip(loss_mask, sample_ids, strict=True):
        generator = sample_generator(seed, sample_id)
        allowed = ((mask[:-1] > 0) & (mask[1:] > 0)).nonzero().flatten()
        order = torch.randperm(len(allowed), generator=generator)[:num_anchors]
        anchors.append(allowed[order].sort().values)
        flags.append(torch.rand(len(anchors[-1]), generator=generator, dtype=torch.float64) < probability)
    shape = (len(anchors), max(1, *map(len, anchors)))
    blocks = Blocks(*(torch.zeros(shape, dtype=kind) for kind in (torch.long, torch.bool, torch.bool)))
    for index, (drawn, flag) in enumerate(zip(anchors, flags, strict=True)):
        blocks.anchors[index, : len(drawn)] = drawn
        blocks.keep[index, : len(drawn)] = True
        blocks.replaced[index, : len(drawn)] = flag
    return blocks
