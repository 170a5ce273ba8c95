"""From logits to the distribution that is drawn from: temperature, then top-k, then top-p; for target and draft.

    temperature   softmax(logits / temperature); 0 is greedy, which draws nothing
    top-k         the k best (0: all); of equal ones the lower index first
    top-p         the fewest best whose probabilities, after top-k, reach top-p (1: all); the first always stays

One function serves the target's logits over V and the walk's scores over K candidates, so that p and q are under the
same transform (z-lab/dflash#169). Verification needs q only to be what was really drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TEMPERATURE = 0.01
"""Below it, logits divided by the temperature leave the range of float32."""


@dataclass(frozen=True)
class Sampling:
    """How target and draft choose.

    Raises:
        ValueError: a value out of its range, by name.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: 0, which is greedy, or at least {LEAST_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: above 0 and at most 1, which keeps everything")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: at least 0, which keeps everything")

    @property
    def greedy(self) -> bool:
        """Is the best one always taken?"""
        return self.temperature == 0


GREEDY = Sampling()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """What ``logits`` [.., n] are drawn from: probabilities [.., n], float32 or wider; not for greedy."""
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


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index [..] for each row of ``weights`` [.., n], with probability proportional to them."""
    flat = weights.reshape(-1, weights.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).reshape(weights.shape[:-1])


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One index [..] for each row of ``logits`` [.., n]: the best (of equal ones the lowest), or a draw."""
    return logits.argmax(dim=-1) if sampling.greedy else draw(distribution(logits, sampling), generator)
