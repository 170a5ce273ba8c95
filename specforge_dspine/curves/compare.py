"""Comparison of two training curves: absolute deviations, drift, where they start, and a figure.

Residuals are relative to the part's root mean square over the reference:

    d_i = (c_i − r_i) / s,    s = √(mean_i r_i²)

A curve deviates at step i where |d_i| exceeds the part's tolerance. It drifts where the mean of d over the whole run,
or over its last third, exceeds a narrower one: rounding scatters d about zero and a mistake pushes it one way, so the
mean sees what is below the first tolerance. How both were chosen: tests/curves/README.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specforge_dspine.utils.figures import figure_axes


@dataclass(frozen=True)
class Curve:
    """A run: its ``name``, the resolved ``recipe`` (no paths of a machine), and ``parts``: name → value per step."""

    name: str
    recipe: dict[str, Any]
    parts: dict[str, list[float]]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.parts["loss"])


class Deviation(NamedTuple):
    """A ``part`` that disagrees from a ``step`` (1-based) on; ``kind`` is "absolute", "drift" or "missing".

    ``size`` is the largest |d|, or |mean d|.
    """

    part: str
    kind: str
    step: int
    size: float
    allowed: float

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.part}: missing from step {self.step}"
        return f"{self.part}: {self.kind} {self.size:.1e} (allowed {self.allowed:.0e}), from step {self.step}"


class Tolerance(NamedTuple):
    """Limits of |d| at the ``first`` step, where both runs have the same weights and only one forward's rounding lies
    between them; of |d| at any step (``absolute``); and of |mean d| (``drift``)."""

    first: float
    absolute: float
    drift: float


# The first pattern that matches a part. Where rounding decides the sign of q − p, which is ℓ1's gradient, or the K-th
# candidate, all parts jump a little; most of all refined ones, the candidates' mass, and shares of few positions.
TOLERANCES = (
    (re.compile(r"rows|replaced_share|beta"), Tolerance(1e-6, 1e-6, 1e-6)),  # no float that training touches
    (re.compile(r"(refined_)?(accuracy|tau)|coverage"), Tolerance(1e-1, 5e-1, 2e-2)),
    (re.compile(r"refined_(ce|l1)|candidate_mass"), Tolerance(1e-4, 1e-1, 5e-3)),
    (re.compile(r"grad_norm"), Tolerance(1e-4, 1e-1, 1e-2)),
    (re.compile(r".*"), Tolerance(1e-5, 1e-2, 1e-3)),
)
TRAILING = 3  # the last 1/TRAILING of the steps is the window in which late drift shows
PANELS = ("loss", "ce", "l1", "refined_ce", "refined_l1", "candidate_mass", "refined_accuracy", "grad_norm")
COLUMNS = 4


def tolerance_of(part: str) -> Tolerance:
    """The tolerance of ``part``."""
    return next(tolerance for pattern, tolerance in TOLERANCES if pattern.fullmatch(part))


def residuals(reference: Sequence[float], values: Sequence[float]) -> list[float]:
    """d_i of the steps that both have; s is 1 for a part that is zero throughout the reference."""
    scale = math.sqrt(sum(r * r for r in reference) / len(reference)) or 1.0
    return [(c - r) / scale for r, c in zip(reference, values, strict=False)]


def compare_part(part: str, d: Sequence[float]) -> list[Deviation]:
    """Deviations of one part from its residuals:

        absolute:  |d_1| > first,  or max_i |d_i| > absolute
        drift:     max(|mean(d)|, |mean(d over the last third)|) > drift

    A drift starts at the first step of its window at which d exceeds the drift's tolerance in the drift's direction.
    """
    allowed = tolerance_of(part)
    found = beyond(part, d, [allowed.first] + [allowed.absolute] * (len(d) - 1))
    for start in (0, len(d) - max(1, len(d) // TRAILING)):
        window = d[start:]
        mean = sum(window) / len(window)
        if abs(mean) > allowed.drift:
            step = next(i for i, value in enumerate(window, start) if value * math.copysign(1, mean) > allowed.drift)
            found.append(Deviation(part, "drift", step + 1, abs(mean), allowed.drift))
            break
    return found


def beyond(part: str, d: Sequence[float], limits: Sequence[float]) -> list[Deviation]:
    """The absolute deviation, if any |d_i| exceeds its limit or is not finite."""
    steps = [i for i, (value, limit) in enumerate(zip(d, limits, strict=True)) if not abs(value) <= limit]
    size = max((abs(d[i]) if math.isfinite(d[i]) else math.inf for i in steps), default=0.0)
    return [Deviation(part, "absolute", steps[0] + 1, size, limits[steps[0]])] if steps else []


def compare(
    reference: Curve, curve: Curve, check: Callable[[str, Sequence[float]], list[Deviation]] = compare_part
) -> list[Deviation]:
    """Deviations of ``curve`` from ``reference``, earliest first, by ``check`` of each part's residuals; parts that
    only ``curve`` has are ignored."""
    found: list[Deviation] = []
    for part, expected in reference.parts.items():
        values = curve.parts.get(part, [])
        if len(values) != len(expected):
            found.append(Deviation(part, "missing", min(len(values), len(expected)) + 1, math.inf, 0.0))
        if values:
            found += check(part, residuals(expected, values))
    return sorted(found, key=lambda deviation: (deviation.step, -deviation.size / max(deviation.allowed, 1e-30)))


def agree(curves: Mapping[str, Curve], allowed: float) -> list[Deviation]:
    """Deviations within a group that is equal by construction: every curve against the first.

    |d_i| ≤ ``allowed`` at every step and in every part. Parts are named ``part (curve)``.
    """
    (_, reference), *others = curves.items()
    found = [
        deviation._replace(part=f"{deviation.part} ({name})")
        for name, curve in others
        for deviation in compare(reference, curve, lambda part, d: beyond(part, d, [allowed] * len(d)))
    ]
    return sorted(found, key=lambda deviation: deviation.step)


def draw_curve(
    path: Path, reference: Curve, curve: Curve | None = None, deviations: Sequence[Deviation] = ()
) -> None:
    """Draw ``reference``, with ``curve`` over it and residuals below, if it is given.

    Parts that deviate come first, with a line at the step where they start.
    """
    starts: dict[str, int] = {}
    for deviation in deviations:
        starts.setdefault(deviation.part, deviation.step)
    names = list(dict.fromkeys([*starts, *(part for part in PANELS if part in reference.parts)]))[: len(PANELS)]
    title = f"{reference.name}: {len(deviations)} deviations" if curve is not None else reference.name
    with figure_axes(path, 4, COLUMNS, size=(20, 13), title=title, dpi=80) as axes:
        for index, part in enumerate(names):
            place = index + COLUMNS * (index // COLUMNS)  # residuals take every second row
            above, below = axes[place], axes[place + COLUMNS]
            expected, values = reference.parts[part], curve.parts.get(part, []) if curve is not None else []
            above.plot(range(1, len(expected) + 1), expected, label="reference")
            if values:
                d, tolerance = residuals(expected, values), tolerance_of(part)
                above.plot(range(1, len(values) + 1), values, "--", label="this run")
                below.plot(range(1, len(d) + 1), d, color="tab:red")
                for limit, style in ((tolerance.absolute, "--"), (tolerance.drift, ":")):
                    for signed in (-limit, limit):
                        below.axhline(signed, color="gray", linestyle=style, linewidth=0.8)
                below.set(ylabel="residual / typical size")
                below.set_yscale("symlog", linthresh=tolerance.drift)
            if part in starts:
                above.axvline(starts[part], color="tab:red", linewidth=0.8)
            above.set(title=part + (f": deviates from step {starts[part]}" if part in starts else ""))
