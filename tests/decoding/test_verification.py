"""Verification loses nothing: the sampled rule against the exact joint distribution of a tiny target, and the same
with a wrong q, which must fail; the greedy rule; the transform."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.loop import decode
from specforge_dspine.decoding.proposal import Proposal, candidates, walk
from specforge_dspine.decoding.sampling import Sampling, distribution, draw
from specforge_dspine.decoding.transition_cache import transition_cache
from specforge_dspine.decoding.verification import verify, verify_greedy, verify_sampled
from tests.support.chi_square import p_value
from tests.support.pairs import tiny_drafter, tiny_target, verifier

VOCAB, PROMPT = 6, [0, 3, 1]
JOINT = 3  # tokens
BATCH, LOOPS, WRONG_LOOPS = 100_000, 800, 200
ACCEPTED_P, REFUSED_P = 1e-3, 1e-6
"""A right rule passes above the first (one run in a thousand would fail, and seeds are fixed), a wrong one stays
below the second. Measured: 0.18 to 0.79 for the right rule, 0 to 1e-20 with the wrong q."""

SAMPLINGS = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.6, top-p 0.9": Sampling(temperature=0.6, top_p=0.9),
    "temperature 1.4, top-k 4": Sampling(temperature=1.4, top_k=4),
}


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return tiny_target(VOCAB)


def following(target: Qwen3ForCausalLM, paths: Tensor) -> Tensor:
    """The target's logits [n, t + 1, V] after the prompt and after each token of ``paths`` [n, t], in one forward."""
    prompt = torch.tensor(PROMPT).expand(len(paths), -1)
    with torch.inference_mode():
        return target(torch.cat([prompt, paths], dim=1)).logits[:, len(PROMPT) - 1 :]


def every_path(length: int) -> Tensor:
    """All [V^length, length] sequences, in the order of their numbers to the base V."""
    return torch.cartesian_prod(*[torch.arange(VOCAB)] * length).reshape(-1, length)


def number(paths: Tensor) -> Tensor:
    """The place of each path [n, t] in ``every_path``."""
    place = torch.zeros(len(paths), dtype=torch.long)
    for token in paths.unbind(dim=1):
        place = place * VOCAB + token
    return place


def exact_joint(target: Qwen3ForCausalLM, sampling: Sampling) -> Tensor:
    """The probability [V^3] of every three tokens after the prompt, when the target alone samples."""
    paths = every_path(JOINT)
    p = distribution(following(target, paths)[:, :-1].double(), sampling)  # [V^3, 3, V]
    return p.gather(-1, paths.unsqueeze(-1)).squeeze(-1).prod(dim=-1)


def other_q(proposal: Proposal) -> Proposal:
    """As if every candidate had been as likely: not what was drawn from."""
    assert proposal.q is not None
    return proposal._replace(q=torch.full_like(proposal.q, 1 / proposal.q.shape[-1]))


def one_round_each(target: Qwen3ForCausalLM, sampling: Sampling, *, wrong: bool = False) -> Tensor:
    """Counts [V^3] of the first three tokens in ``BATCH`` responses: a whole block drafted by the real walk after the
    prompt's own first token, verified; what a round leaves open of the three comes from the target itself."""
    generator = torch.Generator().manual_seed(11)
    drafter = tiny_drafter(target)
    prompt = torch.tensor(PROMPT)
    # The anchor is the prompt's last token here, so that the block proposes the first three.
    taps = verifier(target).start(prompt[:-1]).taps
    with torch.inference_mode():
        out = drafter.block(prompt[-1], taps)
        ids, _ = candidates(drafter.draft, drafter.head, out.hidden[0, 0, 1:])
        scores = transition_cache(drafter.draft, drafter.head, out.pre_injection[0, 0, 1:], ids, prompt[-1])
        proposal = walk(scores.expand(BATCH, -1, -1, -1), ids.expand(BATCH, -1, -1), sampling, generator)
    logits = following(target, every_path(JOINT))[number(proposal.tokens)]  # [n, M + 1, V]
    accepted, token = verify(logits, other_q(proposal) if wrong else proposal, sampling, generator)
    responses = torch.where(torch.arange(JOINT) < accepted.unsqueeze(-1), proposal.tokens, 0)
    responses = responses.scatter(-1, accepted.clamp(max=JOINT - 1).unsqueeze(-1), token.unsqueeze(-1))
    responses = torch.where((accepted == JOINT).unsqueeze(-1), proposal.tokens, responses)
    for t in range(1, JOINT):
        rest = distribution(following(target, every_path(t))[:, -1], sampling)[number(responses[:, :t])]
        responses[:, t] = torch.where(accepted >= t, responses[:, t], draw(rest, generator))
    assert 0 < accepted.float().mean() < JOINT, "both kinds of ends must occur"
    return torch.bincount(number(responses), minlength=VOCAB**JOINT)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_blocks_have_the_targets_joint_distribution(target: Qwen3ForCausalLM, sampling: Sampling) -> None:
    assert p_value(one_round_each(target, sampling), exact_joint(target, sampling)) > ACCEPTED_P


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_wrong_q_is_found(target: Qwen3ForCausalLM, sampling: Sampling) -> None:
    assert p_value(one_round_each(target, sampling, wrong=True), exact_joint(target, sampling)) < REFUSED_P


class WrongQ:
    """Drafts as another drafter does and misreports what it drew from."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter = drafter
        self.restart = drafter.restart

    def propose(self, *arguments: object) -> Proposal:
        return other_q(self.drafter.propose(*arguments))  # type: ignore[arg-type]


def decoded(target: Qwen3ForCausalLM, drafter: BlockDrafter | WrongQ, sampling: Sampling, times: int) -> Tensor:
    """Counts [V^3] of the first three tokens that the real loop decodes."""
    generator = torch.Generator().manual_seed(5)
    model, counts = verifier(target), torch.zeros(VOCAB**JOINT)
    for _ in range(times):
        options = {"max_new_tokens": JOINT + 1, "stop": (), "sampling": sampling, "generator": generator}
        trace = decode(drafter, model, PROMPT, **options)  # type: ignore[arg-type]
        counts[number(torch.tensor([trace.response[:JOINT]]))] += 1
    return counts


def test_the_loop_has_the_targets_joint_distribution(target: Qwen3ForCausalLM) -> None:
    """Prefill, rounds of one to four tokens, states carried from round to round."""
    sampling = SAMPLINGS["temperature 1"]
    joint = exact_joint(target, sampling)
    assert p_value(decoded(target, tiny_drafter(target), sampling, LOOPS), joint) > ACCEPTED_P
    assert p_value(decoded(target, WrongQ(tiny_drafter(target)), sampling, WRONG_LOOPS), joint) < REFUSED_P


def test_greedy_accepts_while_the_targets_best_agrees() -> None:
    best = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    tokens = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6]])
    verified = verify_greedy(best, tokens)
    assert verified.accepted.tolist() == [3, 1, 0]
    assert verified.next_token.tolist() == [7, 5, 4], "a bonus, and the target's own token where it disagrees"


def test_the_transform_keeps_what_it_says() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]).log()
    assert torch.allclose(distribution(logits, Sampling(1.0)), logits.exp())
    assert torch.allclose(distribution(logits, Sampling(0.5)), logits.exp() ** 2 / (logits.exp() ** 2).sum())
    kept = distribution(logits, Sampling(1.0, top_k=2))
    assert torch.allclose(kept, torch.tensor([0, 2 / 3, 1 / 3, 0, 0])), "of equal ones the lower index"
    kept = distribution(logits, Sampling(1.0, top_p=0.5))
    assert torch.allclose(kept, torch.tensor([0, 2 / 3, 1 / 3, 0, 0])), "the fewest that reach a half"
    assert distribution(logits, Sampling(1.0, top_p=1e-6)).tolist() == [0, 1, 0, 0, 0], "the first always stays"
    kept = distribution(logits, Sampling(1.0, top_k=3, top_p=0.7))
    assert torch.allclose(kept, torch.tensor([0, 2 / 3, 1 / 3, 0, 0])), "top-p counts what top-k left"
    assert distribution(logits.bfloat16(), Sampling(1.0, top_p=0.9)).dtype is torch.float32


@pytest.mark.parametrize(
    ("values", "named"),
    [({"temperature": -1.0}, "temperature = -1"), ({"top_p": 0.0}, "top_p = 0"), ({"top_k": -2}, "top_k = -2")],
)
def test_impossible_ways_to_sample_are_refused(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**values)  # type: ignore[arg-type]


def test_p_equal_to_q_accepts_everything() -> None:
    """Also where rounding would leave a residual of nothing."""
    p = torch.rand(2000, 2, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(VOCAB).expand(2000, 1, VOCAB)
    proposal = Proposal(draw(p[:, :1], generator), ids, p[:, :1])
    verified = verify_sampled(p, proposal, generator)
    assert (verified.accepted == 1).all()
    larger = proposal._replace(q=2 * proposal.q)  # type: ignore[operator]  # half are rejected, and p − q is nowhere positive
    verified = verify_sampled(p, larger, generator)
    rejected = verified.accepted == 0
    assert 800 < rejected.sum() < 1200
    assert (verified.next_token < VOCAB).all() and len(verified.next_token[rejected].unique()) == VOCAB
