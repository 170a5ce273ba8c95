"""Checks a report against its own traces: every figure follows from ids and proposals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


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
        assert anchor >= len(ids) - 1, "the rounds reach the answer's end"
    return tokens / rounds


def check_report(path: Path) -> dict:  # type: ignore[type-arg]
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in content["variants"].items():
        assert entry["tau"] == pytest.approx(recomputed_tau(content["traces"][name]), rel=1e-12), name
        assert entry["rounds"] == sum(len(trace["rounds"]) for trace in content["traces"][name])
    gain = content["variants"]["refined"]["tau"] - content["variants"]["unrefined"]["tau"]
    assert content["refinement_gain"] == pytest.approx(gain)
    low, high = content["refinement_gain_interval_95"]
    assert low <= gain <= high
    return content
