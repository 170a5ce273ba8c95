"""Comparison of two tensors: errors and tolerances by dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Qwen3's RoPE and norms compute in float32 in every dtype, hence 1e-6 and not 1e-12 in float64. float32 gets a few
# times the 1e-5 of a single run; bfloat16 has 8 bits, and discrete choices may flip.
TOLERANCE = {torch.float64: 5e-6, torch.float32: 5e-5, torch.bfloat16: 1.5e-1}
FLIPPED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 0.35}  # share of discrete values that may differ
# ℓ1's gradient is sign(q − p): where q ≈ p, eight bits flip it. In bfloat16 a gradient is compared as a whole, by
# ‖a − b‖ / min(‖a‖, ‖b‖): 0.1 to 0.8 here, √2 for one of another direction, 2 for the wrong sign or three times
# the size, infinite for none at all.
GRADIENT_NORM = 1.0
FLOOR = 1e-12  # of a norm to divide by


class Check(NamedTuple):
    """One quantity: its relative error (for discrete ones: the share that differs) and its tolerance."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether it is within tolerance; False for NaN."""
        return self.error <= self.tolerance


def check(name: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Check:
    """Compare a quantity that was computed in ``dtype``."""
    if ours.shape != theirs.shape:
        return Check(name, float("inf"), TOLERANCE[dtype])
    a, b = ours.detach().double(), theirs.double()
    if dtype is torch.bfloat16 and name.startswith("grads_"):
        error = (a - b).norm() / torch.minimum(a.norm(), b.norm()).clamp_min(FLOOR)
        return Check(name, float(error), GRADIENT_NORM)
    if not theirs.is_floating_point():
        return Check(name, float((ours.to(theirs.dtype) != theirs).double().mean()), FLIPPED[dtype])
    return Check(name, float((a - b).abs().max() / b.abs().max().clamp_min(FLOOR)), TOLERANCE[dtype])


def candidate_error(logits: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """The largest gap between the logits of the i-th best of two top-K sets [.., K].

    It is relative to the largest of ``logits`` [.., V] (−∞: excluded), and infinite if ``theirs`` has another shape,
    an impossible id, or the same id twice.
    """
    ordered = theirs.sort(dim=-1).values
    if (
        ours.shape != theirs.shape
        or not 0 <= int(theirs.min()) <= int(theirs.max()) < logits.shape[-1]
        or bool((ordered[..., 1:] == ordered[..., :-1]).any())
    ):
        return scalar(float("inf"))
    best, given = (logits.gather(-1, ids).sort(dim=-1).values for ids in (ours, theirs))
    return (best - given).abs().max() / logits[logits.isfinite()].abs().max()


def scalar(value: float) -> Tensor:
    """A number as a tensor."""
    return torch.tensor(value, dtype=torch.float64)
