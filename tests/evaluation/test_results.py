"""Acceptance length: τ, intervals and histograms of rounds, and reports recomputed from their traces."""

from __future__ import annotations

import pytest

from specforge_dspine.decoding.loop import Round, Trace
from specforge_dspine.evaluation.results import (
    acceptance_by_position,
    accepted_lengths,
    mean_tau,
    summary,
    tau,
    tau_difference,
)
from tests.support import ROOT
from tests.support.reports import check_report

PUBLISHED = ROOT / "docs" / "results" / "demo" / "report.json"

ROUNDS = (Round(2, (3, 9, 9), 1), Round(4, (5, 6, 7), 3), Round(8, (1, 1, 1), 0), Round(9, (10, 11, 12), 3))
FOUR_ROUNDS = Trace("a", tuple(range(14)), 2, ROUNDS)


def test_figures_of_a_trace_worked_out_by_hand() -> None:
    assert FOUR_ROUNDS.tokens == 11 == 2 + 4 + 1 + 4
    assert tau({"set": [FOUR_ROUNDS]}).value == 11 / 4
    assert accepted_lengths([FOUR_ROUNDS], 3) == [1, 1, 0, 2]
    assert acceptance_by_position([FOUR_ROUNDS], 3) == [3 / 4, 2 / 4, 2 / 4]
    found = summary({"set": [FOUR_ROUNDS, FOUR_ROUNDS]}, 3)
    assert found["tau_interval_95"] is None, "one prompt says nothing of others"
    assert (found["prompts"], found["responses"], found["rounds"], found["tokens"]) == (1, 2, 8, 22)


def test_positions_behind_the_responses_end_do_not_count() -> None:
    cut = Trace("a", tuple(range(5)), 2, (Round(2, (3, 4, 9), 2),))
    assert cut.tokens == 2 and acceptance_by_position([cut], 3) == [1.0, 1.0, None]


def trace(tokens: int, rounds: int, name: str = "a") -> Trace:
    return Trace(name, tuple(range(tokens + 1)), 0, (Round(0, (), 0),) * rounds)


def bounds(a: list[Trace], b: list[Trace] | None = None) -> tuple[float, float]:
    found = tau({"set": a}) if b is None else tau_difference({"set": a}, {"set": b})
    assert found.interval is not None and found.value is not None
    assert found.interval[0] <= found.value <= found.interval[1]
    return found.interval


def test_interval_covers_and_pairs() -> None:
    better = [trace(30, 20 - i % 3, str(i)) for i in range(40)]
    worse = [trace(30, 22 - i % 3, str(i)) for i in range(40)]
    low, high = bounds(better)
    assert low < 40 * 30 / sum(20 - i % 3 for i in range(40)) < high
    low, high = bounds(better, worse)
    assert 0 < low < high
    gain = tau_difference({"set": better}, {"set": worse}).value
    assert gain == (tau({"set": better}).value or 0) - (tau({"set": worse}).value or 0)
    low, high = bounds(better, better[::-1])
    assert low == high == 0, "paired by name"
    with pytest.raises(ValueError, match="different prompts"):
        bounds(better, worse[1:])


def test_turns_of_a_conversation_are_drawn_together() -> None:
    """Ten responses that agree two by two are five observations, not ten: the interval is wider by √2."""
    single = [trace(30, 10 + 4 * (i % 5), str(i)) for i in range(400)]
    paired = [trace(30, 10 + 4 * (i // 2 % 5), str(i // 2)) for i in range(400)]
    widths = [high - low for low, high in (bounds(single), bounds(paired))]
    assert widths[1] / widths[0] == pytest.approx(2**0.5, rel=0.1)


def test_each_set_counts_once_in_the_mean() -> None:
    sets = {"many": [trace(30, 10, str(i)) for i in range(50)], "few": [trace(30, 30, str(i)) for i in range(2)]}
    assert mean_tau(sets) == (2.0, (2.0, 2.0))
    assert summary(sets, 0)["tau"] > 2.7
    assert summary(sets, 0)["tau_interval_95"] == pytest.approx([summary(sets, 0)["tau"]] * 2), "no set varies"
    assert mean_tau(sets | {"none": [Trace("a", (5, 6), 1, ())]}).value == 2.0


def test_responses_of_one_token_say_nothing() -> None:
    nothing = [Trace("a", (5, 6), 1, ())]
    assert tau({"set": nothing}) == (None, None) == tau({})
    assert bounds([*nothing, trace(30, 10, "b"), trace(30, 10, "c")]) == (3.0, 3.0)
    assert mean_tau({"set": nothing}) == (None, None) == mean_tau({})


def test_published_report_holds_what_the_results_quote() -> None:
    """The demo's report in the repository: enough prompts and rounds, and its figures follow from its traces."""
    content = check_report(PUBLISHED)
    assert content["prompts"] == len(content["traces"]["refined"]) >= 60
    assert content["variants"]["refined"]["rounds"] >= 1500
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for entry in content["variants"].values():
        assert f"{entry['tau']:.3f}" in page
