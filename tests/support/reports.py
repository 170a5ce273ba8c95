"""Checks a report against its own traces: every figure follows from ids and proposals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.results import summary, tau_difference
from specforge_dspine.utils.files import as_json


def recomputed_tau(traces: list[dict]) -> float:  # type: ignore[type-arg]
    """τ from ids and proposals alone: nothing that the report itself counted is used."""
    tokens = rounds = 0
    for trace in traces:
        ids, anchor = trace["ids"], trace["prompt"]
        for entry in trace["rounds"]:
            assert entry["anchor"] == anchor
            accepted = 0
            while (
                accepted < len(entry["proposed"])
                and anchor + 1 + accepted < len(ids)
                and entry["proposed"][accepted] == ids[anchor + 1 + accepted]
            ):
                accepted += 1
            assert entry["accepted"] == accepted
            tokens += min(accepted + 1, len(ids) - 1 - anchor)
            rounds += 1
            anchor += accepted + 1
        assert anchor >= len(ids) - 1, "the rounds reach the response's end"
    return tokens / rounds


def check_report(path: Path) -> dict:  # type: ignore[type-arg]
    """Recompute the report's figures, intervals to the last digit, from its traces."""
    content = json.loads(path.read_text(encoding="utf-8"))
    traces = {name: [Trace.from_json(trace) for trace in each] for name, each in content["traces"].items()}
    for name, entry in content["variants"].items():
        assert entry["tau"] == pytest.approx(recomputed_tau(content["traces"][name]), rel=1e-12), name
        assert entry["rounds"] == sum(len(trace["rounds"]) for trace in content["traces"][name])
        summarized = summary({"set": traces[name]}, entry["draft"]["block_size"] - 1)
        assert {figure: entry[figure] for figure in summarized} == as_json(summarized), name
    gain, interval = tau_difference({"set": traces["refined"]}, {"set": traces["unrefined"]})
    assert gain is not None and interval is not None
    assert gain == content["refinement_gain"] and list(interval) == content["refinement_gain_interval_95"]
    assert gain == pytest.approx(content["variants"]["refined"]["tau"] - content["variants"]["unrefined"]["tau"])
    assert interval[0] <= gain <= interval[1]
    return content
