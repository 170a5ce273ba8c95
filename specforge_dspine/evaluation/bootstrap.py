"""Figures over prompts with bootstrap intervals, all of a study on the same draws.

A figure is a function of sums over prompts, as right / all of an accuracy. Prompts are drawn, not positions, since
those of one answer resemble each other; and because every figure sees the same draws, differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specforge_dspine.decoding.loop import Trace

BOOTSTRAP = 10_000
LEVEL = 0.95
INTERVAL = f"bootstrap over the prompts of each set, {BOOTSTRAP} resamples"
Sets = Mapping[str, Sequence[Trace]]
"""Answers by set."""


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


Sums = tuple[np.ndarray, np.ndarray]
"""Of every prompt [P] what was counted, and out of how many."""


class Resampled:
    """``prompts`` P of them, drawn with replacement ``BOOTSTRAP`` times."""

    def __init__(self, prompts: int, seed: int = 0) -> None:
        shares = np.full(prompts, 1 / prompts)
        self.weights = np.random.default_rng(seed).multinomial(prompts, shares, size=BOOTSTRAP).astype(float)

    def ratio(self, a: Sums) -> dict[str, Any]:
        """Σ counted / Σ all, with ``count`` Σ all."""
        return self._figure(lambda hits, count: hits / count, *a) | {"count": int(a[1].sum())}

    def difference(self, a: Sums, b: Sums) -> dict[str, Any]:
        """ratio(a) − ratio(b)."""
        return self._figure(lambda p, m, q, n: p / m - q / n, *a, *b)

    def relative(self, a: Sums, b: Sums) -> dict[str, Any]:
        """ratio(a) / ratio(b) − 1."""
        return self._figure(lambda p, m, q, n: (p / m) / (q / n) - 1, *a, *b)

    def _figure(self, of: Callable[..., Any], *sums: np.ndarray) -> dict[str, Any]:
        """``value`` and ``interval_95``; None where nothing was counted. Draws without any count are left out."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = of(*(np.float64(each.sum()) for each in sums))
            draws = of(*(self.weights @ each for each in sums))
        draws = draws[np.isfinite(draws)]
        if not np.isfinite(value) or not len(draws):
            return {"value": None, "interval_95": None}
        return {"value": float(value), "interval_95": quantiles(draws)}
