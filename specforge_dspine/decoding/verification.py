"""Lossless verification (§6.4): what is accepted of a block, and the token that follows it.

    greedy    accept x̂_1 .. x̂_n while each equals the target's best token; then that best token
    sampled   accept x̂_t with probability min(1, p_t(x̂_t) / q_t(x̂_t)); at the first rejection draw from
              normalize(max(0, p_t − q_t)); if all M pass, a bonus token from p_{M+1}

p_t is the target's distribution after x̂_1 .. x̂_{t−1}, and q_t the one that x̂_t was really drawn from, whatever it is:
then the tokens that come out have the target's distribution, whatever the draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specforge_dspine.decoding.proposal import Proposal
from specforge_dspine.decoding.sampling import Sampling, distribution, draw


class Verdict(NamedTuple):
    """Leading proposals ``accepted`` [..] (0..M), and the target's own ``token`` [..] after them."""

    accepted: Tensor
    token: Tensor


def leading(right: Tensor) -> Tensor:
    """How many leading entries of ``right`` [.., M] (bool) are true [..]."""
    return right.long().cumprod(dim=-1).sum(dim=-1)


def verify(logits: Tensor, proposal: Proposal, sampling: Sampling, generator: torch.Generator) -> Verdict:
    """The rule that ``sampling`` asks for; ``logits`` [.., M + 1, V] are the target's after the anchor and after
    each proposed token."""
    if proposal.q is None:
        return verify_greedily(logits.argmax(dim=-1), proposal.tokens)
    return verify_sampled(distribution(logits, sampling), proposal, generator)


def verify_greedily(best: Tensor, tokens: Tensor) -> Verdict:
    """``best`` [.., M + 1], the target's argmax after the anchor and after each of ``tokens`` [.., M]."""
    accepted = leading(best[..., :-1] == tokens)
    return Verdict(accepted, best.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def verify_sampled(p: Tensor, proposal: Proposal, generator: torch.Generator) -> Verdict:
    """``p`` [.., M + 1, V]: the target's distributions after the anchor and after each proposed token."""
    assert proposal.q is not None
    q = torch.zeros_like(p)  # the last row stays 0: normalize(max(0, p − 0)) is the bonus token's p
    q[..., :-1, :].scatter_(-1, proposal.ids, proposal.q.to(p.dtype))
    tokens = proposal.tokens.unsqueeze(-1)
    p_token, q_token = (each[..., :-1, :].gather(-1, tokens).squeeze(-1) for each in (p, q))
    chance = torch.rand(p_token.shape, dtype=p.dtype, device=p.device, generator=generator)
    accepted = leading(chance * q_token < p_token)
    row = accepted[..., None, None].expand(*accepted.shape, 1, p.shape[-1])
    p_next, q_next = (each.gather(-2, row).squeeze(-2) for each in (p, q))
    residual = (p_next - q_next).clamp_min(0)
    # Where p and q agree up to rounding, a rejection can leave nothing over; p is then as good as the residual.
    nothing = residual.sum(dim=-1, keepdim=True) == 0
    return Verdict(accepted, draw(torch.where(nothing, p_next, residual), generator))
