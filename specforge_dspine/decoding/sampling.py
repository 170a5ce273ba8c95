"""The sampling transform of target and draft: temperature, then top-k, then top-p.

    temperature   softmax(logits / temperature); 0 is greedy, which draws nothing
    top-k         the k largest (0: all); of equal ones the lower index first
    top-p         the fewest largest whose probabilities, after top-k, reach top-p (1: all); the first always stays

One function serves the target's logits over V and the walk's scores over K candidates, so that p and q are under the
same transform (z-lab/dflash#169).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TEMPERATURE = 0.01
"""Below it, logits divided by the temperature leave the range of float32."""


@dataclass(frozen=True)
class Sampling:
    """How target and draft choose tokens.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: use 0 (greedy), or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: use a value above 0, and at most 1 (keeps everything)")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: use at least 0 (keeps everything)")

    @property
    def greedy(self) -> bool:
        """Whether the argmax is always taken."""
        return self.temperature == 0


GREEDY = Sampling()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probabilities [.., n] of ``logits`` [.., n] in float32 or wider; not for greedy."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1:
        return scaled.softmax(dim=-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[..., sampling.top_k :] = -torch.inf
    kept = ordered.softmax(dim=-1)
    if sampling.top_p < 1:
        before = kept.cumsum(dim=-1) - kept
        kept = kept.masked_fill(before >= sampling.top_p, 0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw an index [..] per row of ``weights`` [.., n], with probability proportional to them."""
    flat = weights.reshape(-1, weights.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).reshape(weights.shape[:-1])


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
    """Choose an index [..] per row of ``logits`` [.., n]: the argmax (of equal ones the lowest), or a draw.

    Returns the indices, and the distributions [.., n] that they were drawn from (greedy: None).
    """
    if sampling.greedy:
        return logits.argmax(dim=-1), None
    q = distribution(logits, sampling)
    return draw(q, generator), q
