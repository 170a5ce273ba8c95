"""Figures over prompts with bootstrap intervals, all of a study on the same draws.

A figure is a function of sums over prompts, as right / all of an accuracy. Prompts are drawn, not positions, since
those of one answer resemble each other; and because every figure sees the same draws, differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specforge_dspine.acceptance import BOOTSTRAP, quantiles

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
