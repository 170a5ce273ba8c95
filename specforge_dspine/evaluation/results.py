"""What an evaluation's records say: figures of every temperature and set, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import INTERVAL
from specforge_dspine.evaluation.metrics import over_sets, summary
from specforge_dspine.evaluation.runner import Record

ROUNDS, RESULT = "rounds.jsonl", "result.json"


def traces_of(records: Sequence[Record], temperature: float) -> dict[str, list[Trace]]:
    """The decoded answers of one temperature, by set."""
    sets: dict[str, list[Trace]] = {}
    for record in records:
        if record["temperature"] == temperature and "trace" in record:
            sets.setdefault(record["set"], []).append(Trace.from_json(record["trace"]))
    return sets


def figures(records: Sequence[Record], temperatures: Sequence[float], proposals: int) -> dict[str, Any]:
    """The results: for each temperature the sets, all answers together, and the mean over sets."""
    by_temperature = {}
    for temperature in temperatures:
        sets = traces_of(records, temperature)
        if sets:
            by_temperature[f"{temperature:g}"] = {
                "overall": summary(sets, proposals),
                "mean_over_sets": over_sets(sets),
                "sets": {name: summary({name: traces}, proposals) for name, traces in sets.items()},
            }
    return {
        "interval": INTERVAL,
        "decoded_live": sum(bool(record.get("live")) for record in records),
        "answers_skipped": [record for record in records if "skipped" in record],
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "temperatures": by_temperature,
    }


def table(result: dict[str, Any]) -> str:
    """τ of every set and temperature as aligned text."""
    lines = [
        f"{'set':<16} {'T':>4} {'τ':>7}  {'95 %':<16} {'rounds':>7} {'tokens':>7}  accepted to position 1, 2, .."
    ]
    for temperature, entry in result["temperatures"].items():
        for name, found in (entry["sets"] | {"all": entry["overall"]}).items():
            shares = " ".join("-" if share is None else f"{share:.1%}" for share in found["acceptance_by_position"])
            lines.append(
                f"{name:<16} {temperature:>4} {number(found['tau']):>7}  {interval(found['tau_interval_95']):<16} "
                f"{found['rounds']:>7} {found['tokens']:>7}  {shares}"
            )
        lines.append(f"{'mean over sets':<16} {temperature:>4} {number(entry['mean_over_sets']['tau']):>7}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def interval(bounds: Sequence[float] | None) -> str:
    """An interval, or a dash where there is none."""
    return "-" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
