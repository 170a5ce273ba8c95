"""Results of an evaluation (§8): acceptance length and related figures of decoded rounds, and a table of them.

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
from specforge_dspine.evaluation.bootstrap import INTERVAL, Estimate, Sums
from specforge_dspine.utils.tables import interval, markdown_table, number

ROUNDS, RESULT = "rounds.jsonl", "result.json"
COLUMNS = ("set", "temperature", "τ", "95 % interval", "rounds", "tokens", "accepted to position 1, 2, ..")

Record = dict[str, Any]
"""A line of rounds.jsonl: one response."""

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
    """τ(a) − τ(b), paired by prompt; a ValueError if a and b hold different prompts."""
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
    value, bounds = tau(sets)
    return {
        "prompts": len({(name, trace.name) for name, each in sets.items() for trace in each}),
        "responses": len(traces),
        "tau": value,
        "tau_interval_95": bounds,
        "rounds": sum(len(trace.rounds) for trace in traces),
        "tokens": sum(trace.tokens for trace in traces),
        "acceptance_by_position": acceptance_by_position(traces, proposals),
        "accepted_lengths": accepted_lengths(traces, proposals),
    }


def traces_of(records: Sequence[Record], temperature: float) -> dict[str, list[Trace]]:
    """The responses of one temperature, by set."""
    sets: dict[str, list[Trace]] = {}
    for record in records:
        if record["temperature"] == temperature and "trace" in record:
            sets.setdefault(record["set"], []).append(Trace.from_json(record["trace"]))
    return sets


def figures(records: Sequence[Record], temperatures: Sequence[float], proposals: int) -> dict[str, Any]:
    """The figures of result.json: for each temperature the sets, all responses together, and the mean over sets."""
    by_temperature = {}
    for temperature in temperatures:
        if sets := traces_of(records, temperature):
            tau, bounds = mean_tau(sets)
            by_temperature[f"{temperature:g}"] = {
                "overall": summary(sets, proposals),
                "mean_over_sets": {"tau": tau, "tau_interval_95": bounds},
                "sets": {name: summary({name: traces}, proposals) for name, traces in sets.items()},
            }
    return {
        "interval": INTERVAL,
        "decoded_live": sum(bool(record.get("live")) for record in records),
        "responses_skipped": [record for record in records if "skipped" in record],
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "temperatures": by_temperature,
    }


def table(result: dict[str, Any]) -> str:
    """τ of every set and temperature, as a Markdown table."""
    lines = []
    for temperature, entry in result["temperatures"].items():
        means = {"rounds": "", "tokens": "", "acceptance_by_position": []} | entry["mean_over_sets"]
        for name, found in (entry["sets"] | {"all": entry["overall"], "mean over sets": means}).items():
            shares = " ".join(number(share, ".1%") for share in found["acceptance_by_position"])
            tau = (number(found["tau"]), interval(found["tau_interval_95"]))
            lines.append((name, temperature, *tau, found["rounds"], found["tokens"], shares))
    return "\n".join(markdown_table(COLUMNS, lines))
