"""Statistics of an ablation: τ of a variant, differences of two, and whether an ordering shows.

With n_p tokens and m_p rounds of prompt p, for one set and one seed, and S seeds:

    τ_set = 1/S Σ_seeds (Σ_p n_p / Σ_p m_p),    τ = mean over sets of τ_set,    d(a, b) = τ(a) − τ(b)

Intervals resample the prompts of each set, and the seeds. All variants see the same draws, so that differences are
paired. A bootstrap over few seeds understates their spread: with S seeds it has (S − 1)/S of the variance, and no
wide tails. So an ordering is only called shown if Student's 95 % interval over the seeds' differences, with S − 1
degrees of freedom, excludes 0 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import LEVEL, estimate
from specforge_dspine.evaluation.results import by_prompt

Counts = dict[str, np.ndarray]
"""Tokens and rounds [S, P, 2] of a variant's seeds and prompts, by set; all sets have the seeds in the same order."""

SHOWS, UNRESOLVED, REVERSED = "shows", "not resolved", "reversed"


class Tau(NamedTuple):
    """A mean acceptance length, or a difference: its ``value``, 95 % ``interval``, and ``per_seed`` [S]."""

    value: float
    interval: tuple[float, float]
    per_seed: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The entry of ablation.json."""
        return {"value": self.value, "interval_95": list(self.interval), "per_seed": list(self.per_seed)}


def count(traces: Sequence[Sequence[Trace]]) -> np.ndarray:
    """Tokens and rounds [S, P, 2] by prompt, from each seed's responses to one set.

    A ValueError if two seeds have different prompts, or no response has a round.
    """
    sums = [by_prompt(responses) for responses in traces]
    names = list(sums[0])
    if any(list(own) != names for own in sums):
        raise ValueError(
            "evaluations to be compared hold different prompts; evaluate the same sets with the same limit"
        )
    if not names:
        raise ValueError("a set holds no response of two tokens or more, and so no round; leave it out")
    return np.array([[own[name] for name in names] for own in sums], dtype=float)


def drawn_tau(counts: Counts, name: str, seeds: np.ndarray, *prompts: np.ndarray) -> np.ndarray:
    """τ [..] of the set ``name``, or under "" the mean of all, of drawn ``seeds`` [.., S] and ``prompts`` [.., P] of
    each set in the order of their names."""
    found = []
    for each, drawn in zip(sorted(counts), prompts, strict=True):
        if name in ("", each):
            tokens, rounds = (counts[each][..., kind][:, drawn].sum(axis=-1) for kind in (0, 1))  # [S, ..]
            by_seed = np.moveaxis(tokens / rounds, 0, -1)
            found.append(np.take_along_axis(by_seed, seeds, axis=-1).mean(axis=-1))
    return np.mean(found, axis=0)


def estimated(tau: Callable[..., np.ndarray], counts: Counts, per_seed: np.ndarray) -> Tau:
    """What ``tau`` gives of drawn seeds and prompts of ``counts``, as in ``drawn_tau``."""
    value = float(per_seed.mean())
    sizes = [counts[name].shape[1] for name in sorted(counts)]
    interval = estimate(tau, len(per_seed), *sizes).interval
    return Tau(value, interval or (value, value), tuple(per_seed.tolist()))


def seeds_of(counts: Counts) -> dict[str, np.ndarray]:
    """τ [S] of each set, and under "" their mean."""
    sums = {name: each.sum(axis=1) for name, each in counts.items()}  # tokens and rounds [S, 2]
    found = {name: each[:, 0] / each[:, 1] for name, each in sums.items()}
    return found | {"": np.mean(list(found.values()), axis=0)}


def taus(counts: Counts) -> dict[str, Tau]:
    """τ of each set, and under "" their mean."""
    return {
        name: estimated(partial(drawn_tau, counts, name), counts, seeds) for name, seeds in seeds_of(counts).items()
    }


def differences(a: Counts, b: Counts) -> dict[str, Tau]:
    """τ(a) − τ(b) of each set, and under "" of their mean; a ValueError if prompts or seeds are not the same."""
    if {name: each.shape for name, each in a.items()} != {name: each.shape for name, each in b.items()}:
        raise ValueError("two variants hold different prompts or seeds; evaluate the same sets with the same limit")
    seeds = seeds_of(a), seeds_of(b)

    def difference(name: str, *drawn: np.ndarray) -> np.ndarray:
        return drawn_tau(a, name, *drawn) - drawn_tau(b, name, *drawn)

    return {name: estimated(partial(difference, name), a, seeds[0][name] - seeds[1][name]) for name in seeds[0]}


def verdict(difference: Tau) -> str:
    """Whether a is above b: both intervals must exclude 0, that over prompts and seeds and that over seeds alone."""
    seeds = np.array(difference.per_seed)
    if len(seeds) < 2:
        return UNRESOLVED
    slack = float(t.ppf((1 + LEVEL) / 2, len(seeds) - 1) * seeds.std(ddof=1) / len(seeds) ** 0.5)
    if min(difference.interval[0], seeds.mean() - slack) > 0:
        return SHOWS
    if max(difference.interval[1], seeds.mean() + slack) < 0:
        return REVERSED
    return UNRESOLVED
