"""Decoding: the cache against sequential refinement, exclusions, ties, and the context that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.proposal import candidates, excluded_mask, propose, walk
from specforge_dspine.decoding.sampling import GREEDY, Sampling, distribution
from specforge_dspine.decoding.transition_cache import path_probabilities, refine_sequentially, transition_cache
from specforge_dspine.objective.training_model import DSpineTrainingModel
from tests.support.chi_square import p_value
from tests.support.drafts import HIDDEN, TAPS, VOCAB, make_batch, make_blocks, make_model

WARM = Sampling(temperature=0.8)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of scores, relative to the largest one of the block


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def walked_path(
    scores: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor | None]:
    """The indices [.., M] of a walk's candidates, and what they were drawn from [.., M, K]."""
    proposal = walk(scores, torch.arange(scores.shape[-1]).expand(scores.shape[:-1]), sampling, generator)
    return proposal.tokens, proposal.q


def blocks_of(dtype: torch.dtype, count: int = 4) -> tuple[DSpineTrainingModel, Tensor, Tensor, Tensor]:
    """A model, pre-injection states u_L of ``count`` blocks [N, M, H], their candidates [N, M, K] and anchors [N]."""
    model, batch = make_model(dtype=dtype), make_batch(1, 20 + count, dtype=dtype)
    blocks = make_blocks([list(range(4, 4 + count))])
    with torch.no_grad():
        out = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks)
        ids, _ = candidates(model.draft_model, model.lm_head.weight, out.hidden[0, :, 1:])
    return model, out.pre_injection[0, :, 1:], ids, batch["input_ids"][0, blocks.anchors[0]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@torch.no_grad()
def test_cache_equals_refining_step_by_step(dtype: torch.dtype) -> None:
    """In float32 the reference has the cache's precision, in bfloat16 it refines in the states' own."""
    model, pre, ids, anchors = blocks_of(dtype, 40)
    scores = transition_cache(model.draft_model, model.lm_head.weight, pre, ids, anchors)
    assert scores.dtype is torch.float32
    walked, _ = walked_path(scores, GREEDY)
    compared = 0
    for block, cache in enumerate(scores):
        states = (pre[block], ids[block], anchors[block])
        path, rows = refine_sequentially(model.draft_model, model.lm_head.weight, *states, GREEDY)
        allowed = TOLERANCE[dtype] * float(cache.abs().max())
        previous = torch.tensor(0)
        for t, (row, index) in enumerate(zip(rows, path, strict=True)):
            met = cache[t, previous]
            assert float((met - row).abs().max()) <= allowed
            first, second = met.topk(2).values
            if first - second <= 2 * allowed:
                break  # a tie within the tolerance: from here on the walks may part
            assert walked[block, t] == index
            previous = index
            compared += 1
    assert compared > 0.9 * walked.numel() if dtype is torch.float32 else compared > 20


@torch.no_grad()
def test_drawing_step_by_step_draws_the_same() -> None:
    model, pre, ids, anchors = blocks_of(torch.float32, 40)
    draft, head = model.draft_model, model.lm_head.weight
    scores = transition_cache(draft, head, pre, ids, anchors)
    for block, cache in enumerate(scores):
        walked, q = walked_path(cache, WARM, seeded(block))
        states = (pre[block], ids[block], anchors[block])
        path, rows = refine_sequentially(draft, head, *states, WARM, seeded(block))
        assert torch.equal(walked, path)
        torch.testing.assert_close(distribution(rows, WARM), q, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_walk_says_what_it_really_drew_from() -> None:
    model, pre, ids, anchors = blocks_of(torch.float32)
    scores = transition_cache(model.draft_model, model.lm_head.weight, pre, ids, anchors)
    path, q = walked_path(scores, WARM, seeded())
    torch.testing.assert_close(q, path_probabilities(scores, path, WARM.temperature))
    narrow = Sampling(temperature=0.8, top_k=2)
    path, q = walked_path(scores, narrow, seeded())
    assert ((q > 0).sum(-1) == 2).all() and (q.gather(-1, path.unsqueeze(-1)) > 0).all()


@torch.no_grad()
def test_draws_follow_the_rows_of_the_cache() -> None:
    """Frequencies of two-step paths against softmax(row / temperature), by χ² (p > 0.001)."""
    scores = torch.randn(2, 3, 3, generator=seeded(3))
    many = scores.expand(20_000, 2, 3, 3)
    path, _ = walked_path(many, WARM, seeded(4))
    first, second = distribution(scores[0, 0], WARM), distribution(scores[1], WARM)
    observed = torch.bincount(path[:, 0] * 3 + path[:, 1], minlength=9)
    assert p_value(observed, (first[:, None] * second).flatten()) > 1e-3


def test_refined_walk_is_not_the_backbone_walk() -> None:
    model, batch, blocks = make_model(), make_batch(), make_blocks([[4, 6, 9], [5, 9, 12]])
    out = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    anchors = batch["input_ids"].gather(1, blocks.anchors)
    states = (model.draft_model, model.lm_head.weight, out.hidden, out.pre_injection, anchors)
    refined, plain = (propose(*states, GREEDY, seeded(), refine=refine) for refine in (True, False))
    assert torch.equal(refined.ids, plain.ids) and refined.q is None
    assert torch.equal(plain.tokens, plain.ids[..., 0]), "the backbone's first choices"
    assert (refined.tokens != plain.tokens).any()


def test_padded_rows_mask_and_reserved_ids_are_never_proposed() -> None:
    """Qwen3#1247: rows after the tokenizer's entries would win here, and must not appear."""
    model = make_model(valid_vocab_size=50, excluded_ids=(7, 9))
    batch, blocks = make_batch(), make_blocks([[4, 6], [5, 9]])
    with torch.no_grad():
        model.lm_head.weight[50:] *= 100
        model.lm_head.weight[[7, 9]] *= 100
    out = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    excluded = excluded_mask(model.draft_model, model.lm_head.weight)
    assert excluded.nonzero().flatten().tolist() == [7, 9, *range(50, VOCAB)]
    ids, logits = candidates(model.draft_model, model.lm_head.weight, out.hidden)
    assert not excluded[ids].any() and torch.isfinite(logits).all()
    anchors = batch["input_ids"].gather(1, blocks.anchors)
    states = (model.draft_model, model.lm_head.weight, out.hidden, out.pre_injection, anchors)
    for sampling in (GREEDY, Sampling(temperature=5.0)):
        for refine in (True, False):
            assert not excluded[propose(*states, sampling, seeded(), refine=refine).tokens].any()


def test_walk_follows_rows_and_breaks_ties_to_the_lowest() -> None:
    scores = torch.zeros(3, 3, 3)
    scores[0, :, 2] = 1.0
    scores[1, 2] = torch.tensor([0.0, 5.0, 5.0])  # a tie after candidate 2: index 1
    scores[1, 0] = torch.tensor([9.0, 0.0, 0.0])
    scores[2, 1] = torch.tensor([3.0, 3.0, 3.0])
    assert walked_path(scores, GREEDY)[0].tolist() == [2, 1, 0]
    probabilities = path_probabilities(scores, torch.tensor([2, 1, 0]), 0.5)
    assert torch.allclose(probabilities[1], torch.softmax(torch.tensor([0.0, 10.0, 10.0]), -1))
    assert torch.allclose(probabilities.sum(-1), torch.ones(3))


@torch.no_grad()
def test_constructed_ties_go_to_the_lowest_candidate() -> None:
    """Every candidate shares its row of the head with another, so that every best score is there twice: exactly,
    for the rows have one entry that is not 0."""
    model, pre, _, anchors = blocks_of(torch.float32, 40)
    draft, head = model.draft_model, model.lm_head.weight
    half = draft.settings.top_k // 2
    ids = torch.arange(draft.settings.top_k).expand(*pre.shape[:2], -1)
    head[: 2 * half] = torch.eye(HIDDEN)[3 : 3 + half].repeat(2, 1)
    scores = transition_cache(draft, head, pre, ids, anchors)
    walked, _ = walked_path(scores, GREEDY)
    assert (walked < half).all() and walked.unique().numel() > 1
    for block in range(len(pre)):
        path, rows = refine_sequentially(draft, head, pre[block], ids[block], anchors[block], GREEDY)
        assert torch.equal(rows[:, :half], rows[:, half : 2 * half])
        assert torch.equal(path, walked[block])


def test_cache_rows_of_slot_one_are_the_anchor() -> None:
    model = make_model()
    pre = torch.randn(4, 32, dtype=torch.float64)
    ids = torch.randint(0, 60, (4, 6))
    cache = transition_cache(model.draft_model, model.lm_head.weight, pre, ids, torch.tensor(3))
    assert cache.shape == (4, 6, 6)
    assert torch.equal(cache[0, 0], cache[0, 5])
    assert not torch.allclose(cache[1, 0], cache[1, 5])


VARIANTS = {
    "dspine": {},
    "no injection": {"injection": False, "alignment": "off"},
    "bidirectional": {"injection": False, "alignment": "off", "causal": False},
    "no refinement": {"refinement": False},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_context_that_is_kept_changes_nothing(options: dict[str, object]) -> None:
    """Twenty rounds of one to five new tokens: the same states, scores and proposals as from the whole context, and
    as training's own forward."""
    model = make_model(dtype=torch.float32, **options)
    draft, tables = model.draft_model, (model.lm_head.weight, model.embed_tokens.weight)
    steps = torch.randint(1, 6, (20,), generator=seeded(5)).tolist()
    batch = make_batch(1, sum(steps) + 6, dtype=torch.float32)
    ids, taps = batch["input_ids"][0], batch["hidden_states"][0]
    keeping, fresh = BlockDrafter(draft, *tables), BlockDrafter(draft, *tables)
    known = 0
    for step in steps:
        anchor, end = ids[known + step], known + step
        ours = keeping.block(anchor, taps[known:end])
        fresh.restart()
        theirs = fresh.block(anchor, taps[:end])
        trained = model.forward_blocks(ids[None], taps[None], make_blocks([[end]]))
        for state in ("hidden", "pre_injection"):
            mine = getattr(ours, state)
            allowed = 1e-5 * float(mine.abs().max())
            for other in (theirs, trained):
                assert float((mine - getattr(other, state)).abs().max()) <= allowed
        assert keeping.context.get_seq_length() == end, "the block's own keys are gone"
        known = end
        for sampling in (GREEDY, WARM):
            a, b = (
                propose(
                    draft, tables[0], out.hidden, out.pre_injection, anchor, sampling, seeded(), refine=keeping.refine
                )
                for out in (ours, theirs)
            )
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.ids, b.ids)
            if a.q is not None and b.q is not None:
                torch.testing.assert_close(a.q, b.q, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_round_costs_the_new_tokens_only() -> None:
    """The draft's projection of features sees each context token once."""
    model = make_model(dtype=torch.float32)
    drafter = BlockDrafter(model.draft_model, model.lm_head.weight, model.embed_tokens.weight)
    seen: list[int] = []
    model.draft_model.fc.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].shape[1]))
    taps = torch.randn(30, TAPS * HIDDEN)
    for start, end in ((0, 20), (20, 21), (21, 26), (26, 30)):
        drafter.propose(torch.tensor(5), taps[start:end], GREEDY, seeded())
    assert seen == [20, 1, 5, 4]
    drafter.restart()
    drafter.propose(torch.tensor(5), taps[:3], GREEDY, seeded())
    assert seen[-1] == 3
