"""Acceptance length and what goes with it, from the rounds that were decoded (§8).

    τ = tokens / rounds,  tokens of a round = accepted + 1, cut at the answer's end

over all answers of a set, not the mean of each answer's own ratio. Intervals resample prompts, not rounds: rounds of
one answer resemble each other, and so do the turns of one conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specforge_dspine.rounds import Trace

BOOTSTRAP = 10_000
LEVEL = 0.95
INTERVAL = f"bootstrap over prompts, {BOOTSTRAP} resamples"


def tau(traces: Sequence[Trace]) -> float:
    """Mean acceptance length: tokens per round over all answers (0 where there was no round)."""
    rounds = sum(len(trace.rounds) for trace in traces)
    return sum(trace.tokens for trace in traces) / rounds if rounds else 0.0


def acceptance_by_position(traces: Sequence[Trace], proposals: int) -> list[float]:
    """Share of rounds [M] whose proposals 1..t were all accepted, among rounds with t answer tokens left."""
    shares = []
    for t in range(1, proposals + 1):
        reached = [r.accepted >= t for trace in traces for r in trace.rounds if r.anchor + t < len(trace.ids)]
        shares.append(float(np.mean(reached)) if reached else 0.0)
    return shares


def accepted_lengths(traces: Sequence[Trace], proposals: int) -> list[int]:
    """How many rounds accepted 0, 1, .. M proposals [M + 1]."""
    lengths = [r.accepted for trace in traces for r in trace.rounds]
    return np.bincount(np.array(lengths, dtype=int), minlength=proposals + 1).tolist()


def resampled(traces: Sequence[Trace], generator: np.random.Generator, count: int = BOOTSTRAP) -> np.ndarray:
    """τ of ``count`` samples of as many prompts, with replacement; answers of one name belong together."""
    sums: dict[str, np.ndarray] = {}
    for trace in traces:
        if trace.rounds:  # an answer of one token says nothing
            sums[trace.name] = sums.get(trace.name, 0) + np.array([trace.tokens, len(trace.rounds)])
    if not sums:
        return np.zeros(count)
    pairs = np.stack(list(sums.values()))
    drawn = pairs[generator.integers(0, len(pairs), size=(count, len(pairs)))].sum(axis=1)
    return drawn[:, 0] / drawn[:, 1]


def quantiles(values: np.ndarray) -> tuple[float, float]:
    """The interval that holds 95 % of ``values`` in its middle."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def tau_interval(a: Sequence[Trace], b: Sequence[Trace] | None = None, *, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of τ(a), or of τ(a) − τ(b) on the same prompts."""
    values = resampled(a, np.random.default_rng(seed))
    return quantiles(values if b is None else values - resampled(b, np.random.default_rng(seed)))


def summary(traces: Sequence[Trace], proposals: int) -> dict[str, Any]:
    """τ with its interval, rounds and tokens, acceptance by position, histogram of accepted lengths."""
    return {
        "prompts": len({trace.name for trace in traces}),
        "answers": len(traces),
        "tau": tau(traces),
        "tau_interval_95": tau_interval(traces),
        "rounds": sum(len(trace.rounds) for trace in traces),
        "tokens": sum(trace.tokens for trace in traces),
        "acceptance_by_position": acceptance_by_position(traces, proposals),
        "accepted_lengths": accepted_lengths(traces, proposals),
    }


def over_sets(sets: Mapping[str, Sequence[Trace]], *, seed: int = 0) -> dict[str, Any]:
    """The mean over sets of their τ, each set counting once, as the paper's tables have it."""
    generator = np.random.default_rng(seed)
    draws = np.mean([resampled(traces, generator) for traces in sets.values()], axis=0)
    return {"tau": float(np.mean([tau(traces) for traces in sets.values()])), "tau_interval_95": quantiles(draws)}
