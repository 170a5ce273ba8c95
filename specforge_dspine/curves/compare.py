"""Do two training curves agree? Absolute deviations, drift, where they start, and a picture.

Residuals are taken part by part, relative to the part's typical size over the reference:

    d_i = (c_i − r_i) / s,    s = √(mean_i r_i²)

A curve deviates at step i where |d_i| exceeds the part's tolerance, and it drifts where the mean of d over the whole
run, or over its last third, exceeds a narrower one. Rounding makes d scatter about zero and a mistake pushes it one
way, so that the mean sees what hides below the first tolerance. How both were chosen: tests/curves/README.md.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


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
    """One part that disagrees: from which ``step`` (1-based) on, and how: ``kind`` is "absolute", "drift" or
    "missing"; ``size`` is |d| at its largest, or |mean d|, beside what was allowed."""

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
    """What is allowed of d: at the ``first`` step, where both runs have the same weights and only one forward's
    rounding lies between them; at any step (``absolute``); and of its mean (``drift``)."""

    first: float
    absolute: float
    drift: float


# By part, the first pattern that matches. Where rounding decides the sign of q − p, which is ℓ1's gradient, or the
# K-th candidate, all parts jump a little; refined ones and the candidates' mass most, shares of rows by whole rows.
TOLERANCES = (
    (re.compile(r"rows|replaced_share|beta"), Tolerance(1e-6, 1e-6, 1e-6)),  # no float that training touches
    (re.compile(r"(refined_)?(accuracy|tau)|coverage"), Tolerance(1e-1, 5e-1, 2e-2)),
    (re.compile(r"refined_(ce|l1)|candidate_mass"), Tolerance(1e-4, 1e-1, 5e-3)),
    (re.compile(r"grad_norm"), Tolerance(1e-4, 1e-1, 1e-2)),
    (re.compile(r".*"), Tolerance(1e-5, 1e-2, 1e-3)),
)
TRAILING = 3  # the last 1/TRAILING of the steps is the window in which late drift shows


def tolerance_of(part: str) -> Tolerance:
    """The tolerances of ``part``."""
    return next(tolerance for pattern, tolerance in TOLERANCES if pattern.fullmatch(part))


def residuals(reference: Sequence[float], values: Sequence[float]) -> list[float]:
    """d_i of the steps that both have; a part that is zero throughout the reference counts as it is."""
    scale = math.sqrt(sum(r * r for r in reference) / len(reference)) or 1.0
    return [(c - r) / scale for r, c in zip(reference, values, strict=False)]


def compare(reference: Curve, curve: Curve) -> list[Deviation]:
    """What of ``curve`` disagrees with ``reference``, earliest first; parts that only ``curve`` has are ignored."""
    found: list[Deviation] = []
    for part, expected in reference.parts.items():
        values = curve.parts.get(part, [])
        if len(values) != len(expected):
            shorter = min(len(values), len(expected))
            found.append(Deviation(part, "missing", shorter + 1, math.inf, 0.0))
        if values:
            found += compare_part(part, residuals(expected, values))
    return sorted(found, key=lambda deviation: (deviation.step, -deviation.size / max(deviation.allowed, 1e-30)))


def compare_part(part: str, d: Sequence[float]) -> list[Deviation]:
    """The deviations of one part from its residuals:

        absolute:  |d_1| > first,  or max_i |d_i| > absolute
        drift:     max(|mean(d)|, |mean(d over the last third)|) > drift

    A drift starts at the first step of its window at which d itself goes beyond the drift's tolerance, its way.
    """
    allowed = tolerance_of(part)
    limits = [allowed.first] + [allowed.absolute] * (len(d) - 1)
    beyond = [i for i, (value, limit) in enumerate(zip(d, limits, strict=True)) if not abs(value) <= limit]
    found = []
    if beyond:
        size = max((abs(d[i]) if math.isfinite(d[i]) else math.inf) for i in beyond)
        found.append(Deviation(part, "absolute", beyond[0] + 1, size, limits[beyond[0]]))
    for start in (0, len(d) - max(1, len(d) // TRAILING)):
        window = d[start:]
        mean = sum(window) / len(window)
        if abs(mean) > allowed.drift:
            step = next(i for i, value in enumerate(window, start) if value * math.copysign(1, mean) > allowed.drift)
            found.append(Deviation(part, "drift", step + 1, abs(mean), allowed.drift))
            break
    return found


def agree(curves: dict[str, Curve], allowed: float) -> list[Deviation]:
    """What differs within a group that is equal by construction: every curve against the first, |d_i| ≤ ``allowed``
    at every step and in every part. The parts are named ``part (curve)``."""
    (_, reference), *others = curves.items()
    found = []
    for name, curve in others:
        for part, expected in reference.parts.items():
            d = residuals(expected, curve.parts.get(part, []))
            beyond = [i for i, value in enumerate(d) if not abs(value) <= allowed]
            if len(d) != len(expected):
                found.append(Deviation(f"{part} ({name})", "missing", len(d) + 1, math.inf, 0.0))
            if beyond:
                size = max(abs(d[i]) for i in beyond)
                found.append(Deviation(f"{part} ({name})", "absolute", beyond[0] + 1, size, allowed))
    return sorted(found, key=lambda deviation: deviation.step)


PANELS = ("loss", "ce", "l1", "refined_ce", "refined_l1", "candidate_mass", "refined_accuracy", "grad_norm")


def draw(path: Path, reference: Curve, curve: Curve | None = None, deviations: Sequence[Deviation] = ()) -> None:
    """Picture of ``reference``, with ``curve`` over it and residuals below where there is one. Parts that deviate
    come first, with a line at the step where they start."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    starts: dict[str, int] = {}
    for deviation in deviations:
        starts.setdefault(deviation.part, deviation.step)
    names = list(dict.fromkeys([*starts, *(part for part in PANELS if part in reference.parts)]))[: len(PANELS)]
    figure, axes = pyplot.subplots(4, len(PANELS) // 2, figsize=(20, 13), constrained_layout=True)
    for index, part in enumerate(names):
        row, column = 2 * (index // (len(PANELS) // 2)), index % (len(PANELS) // 2)
        above, below = axes[row, column], axes[row + 1, column]
        expected = reference.parts[part]
        steps = range(1, len(expected) + 1)
        above.plot(steps, expected, label="reference")
        values = curve.parts.get(part, []) if curve is not None else []
        if values:
            d = residuals(expected, values)
            above.plot(range(1, len(values) + 1), values, "--", label="this run")
            below.plot(range(1, len(d) + 1), d, color="tab:red")
            for limit, style in ((tolerance_of(part).absolute, "--"), (tolerance_of(part).drift, ":")):
                for sign in (-1, 1):
                    below.axhline(sign * limit, color="gray", linestyle=style, linewidth=0.8)
            below.set(ylabel="residual / typical size")
            below.set_yscale("symlog", linthresh=tolerance_of(part).drift)
        if part in starts:
            above.axvline(starts[part], color="tab:red", linewidth=0.8)
        above.set(title=part + (f": off from step {starts[part]}" if part in starts else ""))
        above.legend()
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
    figure.suptitle(f"{reference.name}: {len(deviations)} deviations" if curve is not None else reference.name)
    partial = path.with_name(f".{path.name}.{os.getpid()}.png")
    figure.savefig(partial, dpi=80)
    os.replace(partial, path)
    pyplot.close(figure)
