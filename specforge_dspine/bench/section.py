"""What one section of the benchmark reports, and how long it may measure.

Ratios compare steps of one run, taken in turns: the median over rounds of each round's ratio, with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specforge_dspine.bench.models import PLAIN, Bench

GOALS = {"DSpine ÷ DFlash": 1.25, f"DSpine ÷ {PLAIN}": 1.10, "objective's peak, 64 chunks ÷ none": 1 / 8}


@dataclass
class Section:
    """Lines of the table (quantity, value, unit, note), the goals among them, and every raw number."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    goals: dict[str, dict[str, Any]] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def add(self, quantity: str, value: float, unit: str = "", note: str = "") -> None:
        """Add a line; its note says whether a goal is met."""
        if quantity in GOALS:
            limit, met = GOALS[quantity], value <= GOALS[quantity]
            self.goals[quantity] = {"value": value, "limit": limit, "met": met}
            note = f"{note}; goal ≤ {limit:.3g}: {'met' if met else 'MISSED'}"
        self.lines.append({"quantity": quantity, "value": value, "unit": unit, "note": note})

    def add_share(self, quantity: str, seconds: float, total: float, of: str) -> None:
        """Add a line for a part of ``total`` seconds."""
        self.add(quantity, seconds, "s", f"{seconds / total:.0%} of {of}")

    def add_ratios(self, quantity: str, ratios: Sequence[float], note: str = "") -> None:
        """Add a line for the median of one ratio per round, with its quartiles."""
        self.add(quantity, statistics.median(ratios), note=quartiles(ratios) + note)


@dataclass(frozen=True)
class Plan:
    """What a run measures, how often, and for how long: ``budget_s`` from ``started`` (``time.monotonic``) on."""

    bench: Bench
    warmup: int
    rounds: int
    started: float
    budget_s: float

    def left(self, share: float = 1.0) -> float:
        """Seconds until ``share`` of the budget is used up."""
        return self.started + share * self.budget_s - time.monotonic()

    def turns(self, longest: Callable[[], float], share: float = 1.0) -> Iterator[int]:
        """Rounds, at least one, while another one of ``longest`` seconds fits into that ``share`` of the budget."""
        for turn in range(self.rounds):
            if turn and longest() > self.left(share):
                return
            yield turn


def quartiles(values: Sequence[float]) -> str:
    """Lower and upper quartile, as text."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"quartiles {low:.3f}–{high:.3f}"


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each measured quantity over the rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
