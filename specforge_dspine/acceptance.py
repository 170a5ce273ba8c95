"""Acceptance length and what goes with it, from the rounds that were decoded (§8).

    τ = tokens / rounds,  tokens of a round = accepted + 1, cut at the answer's end

over all answers of a set, not the mean of each answer's own ratio. Intervals resample prompts, not rounds: rounds of
one answer resemble each other, and so do the turns of one conversation. Of several sets each is resampled by itself,
for how many prompts a set has is no accident. A single prompt says nothing of others: it has no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specforge_dspine.rounds import Trace

BOOTSTRAP = 10_000
LEVEL = 0.95
INTERVAL = f"bootstrap over the prompts of each set, {BOOTSTRAP} resamples"

Sets = Mapping[str, Sequence[Trace]]
"""Answers by set."""


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


def by_prompt(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """Tokens and rounds [2] of each prompt, by name; answers of one name belong together, those of one token, which
    has no round, say nothing."""
    sums: dict[str, np.ndarray] = {}
    for trace in sorted(traces, key=lambda each: each.name):
        if trace.rounds:
            sums[trace.name] = sums.get(trace.name, 0) + np.array([trace.tokens, len(trace.rounds)])
    return sums


def resampled(traces: Sequence[Trace], generator: np.random.Generator) -> np.ndarray:
    """Tokens and rounds [``BOOTSTRAP``, 2] of as many prompts, drawn with replacement."""
    pairs = np.stack(list(by_prompt(traces).values()))
    return np.asarray(pairs[generator.integers(0, len(pairs), size=(BOOTSTRAP, len(pairs)))].sum(axis=1))


def pooled(sets: Sets, seed: int) -> np.ndarray | None:
    """τ over all sets together [``BOOTSTRAP``]; None if no set has two prompts with rounds."""
    used = {name: len(by_prompt(traces)) for name, traces in sets.items()}
    if max(used.values(), default=0) < 2:
        return None
    generator = np.random.default_rng(seed)
    drawn = sum(resampled(sets[name], generator) for name, prompts in used.items() if prompts)
    return np.asarray(drawn[:, 0] / drawn[:, 1])  # type: ignore[index]


def quantiles(values: np.ndarray) -> tuple[float, float]:
    """The interval that holds 95 % of ``values`` in its middle."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def tau_interval(a: Sets, b: Sets | None = None, *, seed: int = 0) -> tuple[float, float] | None:
    """Bootstrap interval of τ(a), or of τ(a) − τ(b), where every draw takes the same prompts of both.

    Raises:
        ValueError: a and b hold different prompts.
    """
    values = pooled(a, seed)
    if b is not None:
        prompts = [{name: list(by_prompt(traces)) for name, traces in each.items()} for each in (a, b)]
        if prompts[0] != prompts[1]:
            raise ValueError("the two hold different prompts; evaluate the same sets with the same --limit")
        others = pooled(b, seed)
        values = None if values is None or others is None else values - others
    return None if values is None else quantiles(values)


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
