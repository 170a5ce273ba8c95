"""Acceptance length and related figures of decoded rounds (§8).

    τ = tokens / rounds,  tokens of a round = accepted + 1, cut at the response's end

over all responses of a set, not the mean of each response's own ratio. Intervals draw prompts, with all turns of
their conversation. A single prompt says nothing of others: it has no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation import bootstrap
from specforge_dspine.evaluation.bootstrap import Estimate, Sums

Sets = Mapping[str, Sequence[Trace]]
"""Responses by set."""


def by_prompt(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """Tokens and rounds [2] of each prompt, by name; turns of one prompt are added, responses without a round left
    out."""
    sums: dict[str, np.ndarray] = {}
    for trace in sorted(traces, key=lambda trace: trace.name):
        if trace.rounds:
            sums[trace.name] = sums.get(trace.name, 0) + np.array([trace.tokens, len(trace.rounds)])
    return sums


def sums_of(sets: Sets) -> list[Sums]:
    """Tokens and rounds by prompt, of each set that has rounds."""
    found = (np.array(list(by_prompt(traces).values())) for traces in sets.values())
    return [(sums[:, 0], sums[:, 1]) for sums in found if len(sums)]


def tau(sets: Sets) -> Estimate:
    """Mean acceptance length: tokens per round over all responses of all sets."""
    return bootstrap.ratio(sums_of(sets))


def mean_tau(sets: Sets) -> Estimate:
    """The mean over sets of their τ, each counting once, as in the paper's tables; sets without rounds left out."""
    return bootstrap.mean_ratio(sums_of(sets))


def tau_difference(a: Sets, b: Sets) -> Estimate:
    """τ(a) − τ(b), paired by prompt.

    Raises:
        ValueError: a and b hold different prompts.
    """
    names = [{name: list(by_prompt(traces)) for name, traces in sets.items()} for sets in (a, b)]
    if names[0] != names[1]:
        raise ValueError("the two hold different prompts; evaluate the same sets with the same --limit")
    return bootstrap.difference(sums_of(a), sums_of(b))


def acceptance_by_position(traces: Sequence[Trace], proposals: int) -> list[float | None]:
    """Share of rounds [M] whose proposals 1..t were all accepted, among rounds with t response tokens left; None
    where there was no such round."""
    shares: list[float | None] = []
    for t in range(1, proposals + 1):
        reached = [r.accepted >= t for trace in traces for r in trace.rounds if r.anchor + t < len(trace.ids)]
        shares.append(float(np.mean(reached)) if reached else None)
    return shares


def accepted_lengths(traces: Sequence[Trace], proposals: int) -> list[int]:
    """Number of rounds that accepted 0, 1, .. M proposals [M + 1], up to the response's end."""
    lengths = [r.accepted for trace in traces for r in trace.rounds]
    return np.bincount(np.array(lengths, dtype=int), minlength=proposals + 1).tolist()


def summary(sets: Sets, proposals: int) -> dict[str, Any]:
    """All figures of all sets together."""
    traces = [trace for each in sets.values() for trace in each]
    value, interval = tau(sets)
    return {
        "prompts": len({(name, trace.name) for name, each in sets.items() for trace in each}),
        "responses": len(traces),
        "tau": value,
        "tau_interval_95": interval,
        "rounds": sum(len(trace.rounds) for trace in traces),
        "tokens": sum(trace.tokens for trace in traces),
        "acceptance_by_position": acceptance_by_position(traces, proposals),
        "accepted_lengths": accepted_lengths(traces, proposals),
    }
