"""Figures over prompts with bootstrap intervals (percentile, 95 %).

A figure is a function of sums over prompts, as tokens / rounds. Prompts are drawn, not positions, because positions
of one response resemble each other. Each set's prompts are drawn by themselves. Draws depend on the seed and the
numbers of prompts alone: figures of the same sets are drawn alike, and their differences are paired.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap

RESAMPLES = 10_000
LEVEL = 0.95
INTERVAL = f"bootstrap over the prompts of each set, {RESAMPLES} resamples"

Sums = tuple[np.ndarray, np.ndarray]
"""Of every prompt [P] of a set: what was counted, and out of how many."""


class Estimate(NamedTuple):
    """A figure's ``value`` and its ``interval``; None where nothing was counted."""

    value: float | None
    interval: tuple[float, float] | None


def estimate(figure: Callable[..., np.ndarray], *sizes: int) -> Estimate:
    """Estimate a figure over sets of ``sizes`` prompts; there is no interval where no set has two of them.

    ``figure`` takes the drawn prompts' indices [.., n] of each set, and returns the figure [..] of each draw. Draws
    without a finite figure are left out.
    """
    varying = [np.arange(n) for n in sizes if n > 1]

    def statistic(*drawn: np.ndarray, axis: int) -> np.ndarray:
        rest = iter(drawn)
        return figure(*(next(rest) if n > 1 else np.zeros((len(drawn[0]), 1), dtype=int) for n in sizes))

    options: Any = {"n_resamples": RESAMPLES, "method": "percentile", "vectorized": True, "rng": 0}
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # of draws without a finite figure
        value = float(figure(*map(np.arange, sizes)))
        if not np.isfinite(value):
            return Estimate(None, None)
        if not varying:
            return Estimate(value, None)
        draws = bootstrap(varying, statistic, **options).bootstrap_distribution
    low, high = np.quantile(draws[np.isfinite(draws)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, (float(low), float(high)))


def ratio(sets: Sequence[Sums]) -> Estimate:
    """Σ counted / Σ all, of all sets together."""
    return of_ratios(lambda pooled: pooled, sets)


def difference(a: Sequence[Sums], b: Sequence[Sums]) -> Estimate:
    """ratio(a) − ratio(b), of the same prompts."""
    return of_ratios(operator.sub, a, b)


def relative(a: Sequence[Sums], b: Sequence[Sums]) -> Estimate:
    """ratio(a) / ratio(b) − 1, of the same prompts."""
    return of_ratios(lambda above, below: above / below - 1, a, b)


def mean_ratio(sets: Sequence[Sums]) -> Estimate:
    """The mean over sets of their ratios."""

    def figure(*drawn: np.ndarray) -> Any:
        return np.divide(sum(pooled_ratio([sums], [at]) for sums, at in zip(sets, drawn, strict=True)), len(sets))

    return estimate(figure, *(len(total) for _, total in sets))


def of_ratios(figure: Callable[..., np.ndarray], *groups: Sequence[Sums]) -> Estimate:
    """A figure of the ratios of ``groups``, all of the same prompts."""
    sizes = (len(total) for _, total in groups[0])
    return estimate(lambda *drawn: figure(*(pooled_ratio(sets, drawn) for sets in groups)), *sizes)


def pooled_ratio(sets: Sequence[Sums], drawn: Sequence[np.ndarray]) -> Any:
    """Returns Σ counted / Σ all over the ``drawn`` prompts of all sets."""
    counted, total = (
        sum(sums[kind][indices].sum(axis=-1) for sums, indices in zip(sets, drawn, strict=True)) for kind in (0, 1)
    )
    return np.divide(counted, total)
