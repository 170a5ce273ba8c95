"""Results of an evaluation: figures of every temperature and set, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import INTERVAL
from specforge_dspine.evaluation.metrics import mean_tau, summary
from specforge_dspine.evaluation.runner import Record
from specforge_dspine.utils.tables import interval, markdown_table, number

ROUNDS, RESULT = "rounds.jsonl", "result.json"
COLUMNS = ("set", "temperature", "τ", "95 % interval", "rounds", "tokens", "accepted to position 1, 2, ..")


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
