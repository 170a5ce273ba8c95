"""Rounds lose nothing: greedy responses equal plain greedy decoding, whatever proposes, and stop where that stops."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.loop import Trace, decode, truncate
from specforge_dspine.decoding.proposal import Proposal
from specforge_dspine.decoding.replay import replay, replay_rounds
from specforge_dspine.decoding.sampling import GREEDY, Sampling
from tests.support.pairs import TAPS, tiny_drafter, tiny_target, verifier

VOCAB, PROMPT, NEW, M = 64, [5, 9, 1, 33, 2, 17], 40, 3


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return tiny_target(VOCAB)


def plain_greedy(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Token by token, everything computed again each time."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def respond(
    drafter: BlockDrafter | Scripted, model: Qwen3ForCausalLM, *, stop: tuple[int, ...] = (), count: int = NEW
) -> Trace:
    options = {"max_new_tokens": count, "stop": stop, "sampling": GREEDY, "generator": torch.Generator()}
    return decode(drafter, verifier(model), PROMPT, **options)  # type: ignore[arg-type]


class Scripted:
    """Proposes the row of ``rows`` [S, M] for the anchor's position, which it knows from the states it got."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.seen = rows, 0

    def restart(self) -> None:
        self.seen = 0

    def propose(self, anchor: Tensor, taps: Tensor, *_: object) -> Proposal:
        self.seen += len(taps)
        return Proposal(self.rows[self.seen], torch.empty(M, 0), None)


def scripts(model: Qwen3ForCausalLM) -> dict[str, Scripted]:
    """Drafts that know the target's response: all right, all second choices, right at first, and random ids."""
    ids = torch.tensor([*PROMPT, *plain_greedy(model, PROMPT, NEW + M + 1)])
    with torch.inference_mode():
        ranked = model(ids[None]).logits[0].topk(2).indices  # [S, 2], of the token after each
    windows = ranked[: len(ids) - M].unfold(0, M, 1)  # [.., 2, M]
    right, second = windows[:, 0], windows[:, 1]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, M + 1, (len(right), 1), generator=generator)
    return {
        "right": Scripted(right),
        "second choices": Scripted(second),
        "right at first": Scripted(torch.where(torch.arange(M) < lengths, right, second)),
        "random": Scripted(torch.randint(0, VOCAB, right.shape, generator=generator)),
    }


def test_greedy_responses_are_the_targets_own_whatever_proposes(target: Qwen3ForCausalLM) -> None:
    expected = plain_greedy(target, PROMPT, NEW)
    drafters = scripts(target) | {
        "dspine": tiny_drafter(target),
        "plain": tiny_drafter(target, injection=False, alignment="off", causal=False),
    }
    traces = {name: respond(drafter, target) for name, drafter in drafters.items()}
    for name, trace in traces.items():
        assert list(trace.response) == expected, name
        assert trace.tokens == NEW - 1
        for each in trace.rounds:
            following = trace.ids[each.anchor + 1 : each.anchor + 1 + M]
            same = [ours == theirs for ours, theirs in zip(each.proposed, following, strict=False)]
            assert each.accepted == (same.index(False) if False in same else len(same)), name
    assert len(traces["right"].rounds) == -(-(NEW - 1) // (M + 1)), "every round M + 1 tokens"
    assert len(traces["second choices"].rounds) == NEW - 1, "every round one token"
    assert {r.accepted for r in traces["right at first"].rounds} == set(range(M + 1))


@pytest.mark.parametrize("kind", ["scripted", "draft"])
def test_in_bfloat16_every_token_is_the_verifying_forwards_own_argmax(kind: str) -> None:
    """Two forwards of different lengths round differently there, so plain decoding is no reference."""
    model = tiny_target(VOCAB).bfloat16()
    drafter = scripts(model)["right at first"]
    if kind == "draft":
        drafter = tiny_drafter(model)
        drafter.draft.bfloat16()
    best: list[Tensor] = []
    inner = verifier(model)

    class Watched:
        start, keep = inner.start, inner.keep

        def extend(self, tokens: Tensor):  # type: ignore[no-untyped-def]
            output = inner.extend(tokens)
            best.append(output.logits.argmax(dim=-1))
            return output

    trace = decode(
        drafter, Watched(), PROMPT, max_new_tokens=NEW, stop=(), sampling=GREEDY, generator=torch.Generator()
    )
    assert len(best) == len(trace.rounds)
    for each, own in zip(trace.rounds, best, strict=True):
        new = trace.ids[each.anchor + 1 : each.anchor + 2 + each.accepted]
        assert list(new) == own[: len(new)].tolist()


def test_a_response_ends_where_plain_decoding_would(target: Qwen3ForCausalLM) -> None:
    """At each of its tokens as the end token, whether proposed or the target's own, the first one included."""
    expected = plain_greedy(target, PROMPT, NEW)
    for drafter in (scripts(target)["right"], scripts(target)["second choices"], tiny_drafter(target)):
        for token in dict.fromkeys(expected):
            trace = respond(drafter, target, stop=(token,))
            assert list(trace.response) == expected[: expected.index(token) + 1]
            assert sum(r.accepted for r in trace.rounds) <= trace.tokens
        for count in (1, 2, M, M + 1, M + 2):
            assert list(respond(drafter, target, count=count).response) == expected[:count]
    assert truncate([1, 2, 3], (2,), 9) == [1, 2] and truncate([1, 2, 3], (), 1) == [1]


def test_a_captured_response_gives_the_rounds_of_the_real_target(target: Qwen3ForCausalLM) -> None:
    ids = torch.tensor([*PROMPT, *plain_greedy(target, PROMPT, NEW)])
    with torch.inference_mode():
        states = target(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1][0] for layer in TAPS], dim=-1)
    for drafter in scripts(target).values():
        rounds = replay_rounds(drafter.rows[len(PROMPT) :].tolist(), ids.tolist(), len(PROMPT))
        assert rounds == respond(drafter, target).rounds
    for variant in ({}, {"refinement": False}, {"injection": False, "alignment": "off", "causal": False}):
        for end in (len(ids), len(PROMPT) + 2, len(PROMPT) + 1):
            drafter = tiny_drafter(target, **variant)
            replayed = replay(drafter, ids[:end], taps[:end], len(PROMPT), "")
            assert replayed == respond(drafter, target, count=end - len(PROMPT))


def test_the_same_seed_draws_the_same_response(target: Qwen3ForCausalLM) -> None:
    drafter, warm = tiny_drafter(target), Sampling(temperature=1.0, top_p=0.95)

    def drawn(seed: int) -> Trace:
        generator = torch.Generator().manual_seed(seed)
        options = {"max_new_tokens": NEW, "stop": (), "sampling": warm, "generator": generator}
        return decode(drafter, verifier(target), PROMPT, **options)  # type: ignore[arg-type]

    assert drawn(1) == drawn(1) != drawn(2)
    assert Trace.from_json(asdict(drawn(1))) == drawn(1)
