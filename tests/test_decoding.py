"""Decoding: the cache against refining step by step, exclusions, ties, and the replay against a real loop."""

from __future__ import annotations

import torch
from drafts import MASK_ID, VOCAB, make_batch, make_blocks, make_model

from specforge_dspine.decoding import (
    candidates,
    draft_greedily,
    greedy_walk,
    never_emitted,
    path_probabilities,
    transition_cache,
)


def test_cache_equals_refining_position_by_position() -> None:
    model, batch, blocks = (
        make_model(dtype=torch.float32),
        make_batch(dtype=torch.float32),
        make_blocks([[4, 6], [5, 9]]),
    )
    out = model.draft_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    draft, head = model.draft_model, model.lm_head.weight
    anchors = batch["input_ids"].gather(1, blocks.anchors)
    refined, _ = draft_greedily(draft, head, out.hidden, out.pre_injection, anchors)
    excluded = never_emitted(draft.settings, MASK_ID, VOCAB, head.device)
    ids, _ = candidates(head, out.hidden[..., 1:, :], excluded, draft.settings.top_k)
    previous = anchors
    for t in range(refined.shape[-1]):
        state = draft.refine(out.pre_injection[..., t + 1, :].float(), previous)
        scores = torch.einsum("...h,...kh->...k", state, head[ids[..., t, :]])
        picked = ids[..., t, :].gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        assert torch.equal(picked, refined[..., t])
        previous = picked


def test_refined_walk_is_not_the_backbone_walk() -> None:
    model, batch, blocks = make_model(), make_batch(), make_blocks([[4, 6, 9], [5, 9, 12]])
    out = model.draft_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    anchors = batch["input_ids"].gather(1, blocks.anchors)
    refined, plain = draft_greedily(model.draft_model, model.lm_head.weight, out.hidden, out.pre_injection, anchors)
    assert (refined != plain).any()


def test_padded_rows_mask_and_reserved_ids_are_never_proposed() -> None:
    """Qwen3#1247: rows behind the tokenizer's entries would win here, and must not appear."""
    model = make_model(valid_vocab_size=50, excluded_ids=(7, 9))
    batch, blocks = make_batch(), make_blocks([[4, 6], [5, 9]])
    with torch.no_grad():
        model.lm_head.weight[50:] *= 100
        model.lm_head.weight[[7, 9]] *= 100
    out = model.draft_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    excluded = never_emitted(model.draft_model.settings, MASK_ID, VOCAB, torch.device("cpu"))
    assert excluded.nonzero().flatten().tolist() == [7, 9, *range(50, VOCAB)]
    ids, logits = candidates(model.lm_head.weight, out.hidden, excluded, 6)
    assert not excluded[ids].any() and torch.isfinite(logits).all()
    anchors = batch["input_ids"].gather(1, blocks.anchors)
    for picks in draft_greedily(model.draft_model, model.lm_head.weight, out.hidden, out.pre_injection, anchors):
        assert not excluded[picks].any()


def test_walk_follows_rows_and_breaks_ties_to_the_lowest() -> None:
    scores = torch.zeros(3, 3, 3)
    scores[0, :, 2] = 1.0
    scores[1, 2] = torch.tensor([0.0, 5.0, 5.0])  # a tie after candidate 2: index 1
    scores[1, 0] = torch.tensor([9.0, 0.0, 0.0])
    scores[2, 1] = torch.tensor([3.0, 3.0, 3.0])
    assert greedy_walk(scores).tolist() == [2, 1, 0]
    probabilities = path_probabilities(scores, torch.tensor([2, 1, 0]), 0.5)
    assert torch.allclose(probabilities[1], torch.softmax(torch.tensor([0.0, 10.0, 10.0]), -1))
    assert torch.allclose(probabilities.sum(-1), torch.ones(3))


def test_cache_rows_of_slot_one_are_the_anchor() -> None:
    model = make_model()
    pre = torch.randn(4, 32, dtype=torch.float64)
    ids = torch.randint(0, 60, (4, 6))
    cache = transition_cache(model.draft_model, model.lm_head.weight, pre, ids, torch.tensor(3))
    assert cache.shape == (4, 6, 6)
    assert torch.equal(cache[0, 0], cache[0, 5])
    assert not torch.allclose(cache[1, 0], cache[1, 5])
