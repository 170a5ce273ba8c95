"""Do counts follow a distribution? Pearson's χ², cells that are too rare put together."""

from __future__ import annotations

from scipy.stats import chisquare
from torch import Tensor

RARE = 5.0  # expected counts below this are pooled into one cell


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    """Probability of counts ``observed`` [n] so far or farther from ``probabilities`` [n], if they follow it."""
    counts, total = observed.double(), float(observed.sum())
    expected = probabilities.double() / probabilities.double().sum() * total
    common = expected >= RARE
    cells = [(each[common].tolist(), float(each[~common].sum())) for each in (counts, expected)]
    (seen, rest), (due, rest_due) = cells
    if rest_due >= RARE:
        seen, due = [*seen, rest], [*due, rest_due]
    scale = sum(seen) / sum(due)  # where a rest is too rare to count
    return float(chisquare(seen, [value * scale for value in due]).pvalue)
