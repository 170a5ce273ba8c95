"""Anchors, replacement draws and schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.alignment_gate import alignment_beta
from specforge_dspine.objective.curriculum import draw_blocks, replacement_probability

SETTINGS = DSpineSettings(transfer_rank=4, message_size=4, replacement_layers=1)


def draw(mask: torch.Tensor, ids: list[str], **options: float):  # type: ignore[no-untyped-def]
    defaults = {"seed": 3, "num_anchors": 5, "probability": 0.5}
    return draw_blocks(mask, ids, **(defaults | options))  # type: ignore[arg-type]


def test_probability_holds_then_falls_to_zero() -> None:
    p = [replacement_probability(step, 600, SETTINGS) for step in range(600)]
    assert set(p[:100]) == {0.5}
    assert p[100] == 0.5 and p[150] == pytest.approx(0.25) and p[199] == pytest.approx(0.005)
    assert set(p[200:]) == {0.0}
    assert all(a >= b for a, b in pairwise(p))


def test_beta_follows_the_warm_up() -> None:
    assert [alignment_beta(step, 4, SETTINGS) for step in range(6)] == [0, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert alignment_beta(0, 0, SETTINGS) == 0.5


def test_anchors_have_two_supervised_tokens_and_are_sorted() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1, 0]])
    blocks = draw(mask, ["e0000-a"], num_anchors=99)
    assert blocks.anchors[0].tolist() == [1, 4, 5] and blocks.keep.all()


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    mask = torch.ones(3, 40, dtype=torch.long)
    ids = ["e0000-a", "e0000-b", "e0001-a"]
    together = draw(mask, ids)
    for row, name in enumerate(ids):
        padded = torch.cat([mask[:1], torch.zeros(1, 7, dtype=torch.long)], dim=1)
        alone = draw(padded, [name])
        assert torch.equal(alone.anchors[0], together.anchors[row])
        assert torch.equal(alone.replaced[0], together.replaced[row])
    assert not torch.equal(together.anchors[0], together.anchors[1])
    assert not torch.equal(together.anchors[0], together.anchors[2]), "another epoch draws others"
    assert not torch.equal(draw(mask, ids, seed=4).anchors, together.anchors)
    state = torch.get_rng_state()
    draw(mask, ids)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"


def test_uneven_sequences_are_padded() -> None:
    mask = torch.zeros(2, 12, dtype=torch.long)
    mask[0, 2:9] = 1
    mask[1, 5:7] = 1
    blocks = draw(mask, ["e0000-a", "e0000-b"])
    assert blocks.keep.sum(dim=1).tolist() == [5, 1]
    assert blocks.anchors[1].tolist() == [5, 0, 0, 0, 0]
    assert not blocks.replaced[~blocks.keep].any()


def test_a_batch_without_anchors_gives_one_padding_block() -> None:
    blocks = draw(torch.zeros(2, 6, dtype=torch.long), ["e0000-a", "e0000-b"])
    assert blocks.anchors.shape == (2, 1) and not blocks.keep.any()


def test_one_bernoulli_draw_per_block() -> None:
    mask = torch.ones(200, 60, dtype=torch.long)
    ids = [f"e0000-{i}" for i in range(200)]
    share = draw(mask, ids, num_anchors=50, probability=0.3).replaced.double().mean()
    assert abs(float(share) - 0.3) < 4 * (0.21 / 10_000) ** 0.5
    assert not draw(mask, ids, probability=0.0).replaced.any()
    assert draw(mask, ids, probability=1.0).replaced.all()
