"""Acceptance length and what goes with it, from the rounds that were decoded (§8).

    τ = tokens / rounds,  tokens of a round = accepted + 1, cut at the answer's end

over all answers of a set, not the mean of each answer's own ratio. Intervals resample prompts, not rounds: rounds of
one answer resemble each other, and so do the turns of one conversation. Of several sets each is resampled by itself,
for how many prompts a set has is no accident. A single prompt says nothing of others: it has no interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import Sets, by_prompt, quantiles, resampled, tau_interval


def tau(traces: Sequence[Trace]) -> float | None:
    """Mean acceptance length: tokens per round over all answers; None where there was no round."""
    rounds = sum(len(trace.rounds) for trace in traces)
    return sum(trace.tokens for trace in traces) / rounds if rounds else None


def acceptance_by_position(traces: Sequence[Trace], proposals: int) -> list[float | None]:
    """Share of rounds [M] whose proposals 1..t were all accepted, among rounds with t answer tokens left; None where
    there was no such round."""
    shares: list[float | None] = []
    for t in range(1, proposals + 1):
        reached = [r.accepted >= t for trace in traces for r in trace.rounds if r.anchor + t < len(trace.ids)]
        shares.append(float(np.mean(reached)) if reached else None)
    return shares


def accepted_lengths(traces: Sequence[Trace], proposals: int) -> list[int]:
    """How many rounds accepted 0, 1, .. M proposals [M + 1], those behind the answer's end not counted."""
    lengths = [r.accepted for trace in traces for r in trace.rounds]
    return np.bincount(np.array(lengths, dtype=int), minlength=proposals + 1).tolist()


def summary(sets: Sets, proposals: int) -> dict[str, Any]:
    """τ with its interval, rounds and tokens, acceptance by position, histogram of accepted lengths; of all sets
    together."""
    traces = [trace for each in sets.values() for trace in each]
    return {
        "prompts": len({(name, trace.name) for name, each in sets.items() for trace in each}),
        "answers": len(traces),
        "tau": tau(traces),
        "tau_interval_95": tau_interval(sets),
        "rounds": sum(len(trace.rounds) for trace in traces),
        "tokens": sum(trace.tokens for trace in traces),
        "acceptance_by_position": acceptance_by_position(traces, proposals),
        "accepted_lengths": accepted_lengths(traces, proposals),
    }


def over_sets(sets: Sets, *, seed: int = 0) -> dict[str, Any]:
    """The mean over the sets that have rounds of their τ, each counting once, as the paper's tables have it."""
    used = {name: traces for name, traces in sets.items() if by_prompt(traces)}
    if not used:
        return {"tau": None, "tau_interval_95": None}
    value = float(np.mean([tau(traces) for traces in used.values()]))
    if max(len(by_prompt(traces)) for traces in used.values()) < 2:
        return {"tau": value, "tau_interval_95": None}
    generator = np.random.default_rng(seed)
    draws = [resampled(traces, generator) for traces in used.values()]
    return {"tau": value, "tau_interval_95": quantiles(np.mean([each[:, 0] / each[:, 1] for each in draws], axis=0))}
