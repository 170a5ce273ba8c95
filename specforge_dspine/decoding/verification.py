"""Lossless verification (§6.4): how many proposals are accepted, and the token that follows them.

    greedy    accept x̂_1 .. x̂_n while each equals the target's argmax; then the target's argmax
    sampled   accept x̂_t with probability min(1, p_t(x̂_t) / q_t(x̂_t)); at the first rejection draw from
              normalize(max(0, p_t − q_t)); if all M are accepted, draw a bonus token from p_{M+1}

p_t is the target's distribution after x̂_1 .. x̂_{t−1}, and q_t the distribution that x̂_t was drawn from. The output
then has the target's distribution, whatever the draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specforge_dspine.decoding.proposal import Proposal
from specforge_dspine.decoding.sampling import Sampling, distribution, draw


class VerifiedBlock(NamedTuple):
    """The number of ``accepted`` proposals [..], 0 to M, and the target's own ``next_token`` [..] after them."""

    accepted: Tensor
    next_token: Tensor


def count_leading(flags: Tensor) -> Tensor:
    """Returns the number [..] of leading true entries of ``flags`` [.., M] (bool)."""
    return flags.long().cumprod(dim=-1).sum(dim=-1)


def verify(logits: Tensor, proposal: Proposal, sampling: Sampling, generator: torch.Generator) -> VerifiedBlock:
    """Verify by the rule of ``sampling``; ``logits`` [.., M + 1, V] follow the anchor and each proposed token."""
    if proposal.q is None:
        return verify_greedy(logits.argmax(dim=-1), proposal.tokens)
    return verify_sampled(distribution(logits, sampling), proposal, generator)


def verify_greedy(best: Tensor, tokens: Tensor) -> VerifiedBlock:
    """Compare ``tokens`` [.., M] with the target's argmax ``best`` [.., M + 1] after the anchor and each token."""
    accepted = count_leading(best[..., :-1] == tokens)
    return VerifiedBlock(accepted, best.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def verify_sampled(p: Tensor, proposal: Proposal, generator: torch.Generator) -> VerifiedBlock:
    """Accept by chance; ``p`` [.., M + 1, V] are the target's distributions after the anchor and each token."""
    assert proposal.q is not None
    q = torch.zeros_like(p)  # the last row stays 0: normalize(max(0, p − 0)) is the bonus token's p
    q[..., :-1, :].scatter_(-1, proposal.ids, proposal.q.to(p.dtype))
    tokens = proposal.tokens.unsqueeze(-1)
    p_token, q_token = (each[..., :-1, :].gather(-1, tokens).squeeze(-1) for each in (p, q))
    uniform = torch.rand(p_token.shape, dtype=p.dtype, device=p.device, generator=generator)
    accepted = count_leading(uniform * q_token < p_token)
    p_next, q_next = (torch.take_along_dim(each, accepted[..., None, None], dim=-2).squeeze(-2) for each in (p, q))
    residual = (p_next - q_next).clamp_min(0)
    # Where p and q agree up to rounding, a rejection can leave no residual; p is then as good.
    empty = residual.sum(dim=-1, keepdim=True) == 0
    return VerifiedBlock(accepted, draw(torch.where(empty, p_next, residual), generator))
