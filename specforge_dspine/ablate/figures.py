"""Figures of an ablation, drawn from its report: training curves, τ by position and by set, cost of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specforge_dspine.utils.figures import draw_estimates, figure_axes

LEAST = 1e-4  # of a logarithmic axis
LABELS = {"ce": "backbone's cross-entropy", "tau": "simulated τ, teacher forced"}


def draw_band(axis: Any, steps: list[int], seeds: np.ndarray, label: str) -> None:
    """The mean over seeds [seeds, n] as a line, their range as a band."""
    (line,) = axis.plot(steps, seeds.mean(axis=0), "o-", markersize=3, label=label)
    axis.fill_between(steps, seeds.min(axis=0), seeds.max(axis=0), color=line.get_color(), alpha=0.15)


def draw_curves(report: dict[str, Any], axes: list[Any]) -> None:
    """Training curves."""
    for axis, name in zip(axes, LABELS, strict=True):
        for variant, entry in report["variants"].items():
            seeds = entry["curves"][name]
            values = np.array([list(each.values()) for each in seeds])
            draw_band(axis, [int(step) for step in seeds[0]], values, variant)
        axis.set(title=LABELS[name], xlabel="optimizer step", yscale="log" if name == "ce" else "linear")


def draw_positions(report: dict[str, Any], axes: list[Any]) -> None:
    """Share of rounds that accepted up to a position, over all sets."""
    for variant, entry in report["variants"].items():
        shares = np.array(entry["acceptance_by_position"], dtype=float)  # None: no round got there
        draw_band(axes[0], list(range(1, shares.shape[1] + 1)), np.maximum(shares, LEAST), variant)
    title = f"share of rounds accepted up to position (none: drawn at {LEAST})"
    axes[0].set(title=title, xlabel="position in the block", yscale="log")


def draw_sets(report: dict[str, Any], axes: list[Any]) -> None:
    """τ of every set with its interval; the points are the seeds."""
    variants, sets = report["variants"], list(report["inputs"]["sets"])
    width = 0.8 / len(variants)
    for k, (variant, entry) in enumerate(variants.items()):
        estimates = [*(entry["tau"][name] for name in sets), entry["tau_mean_over_sets"]]
        places = np.arange(len(estimates)) + (k - (len(variants) - 1) / 2) * width
        draw_estimates(axes[0], places, estimates, fmt="_", markersize=9, capsize=2, label=variant)
        for place, each in zip(places, estimates, strict=True):
            axes[0].plot([place] * len(each["per_seed"]), each["per_seed"], "k.", markersize=3, alpha=0.6)
    ticks = {"xticks": range(len(sets) + 1), "xticklabels": [*sets, "mean over sets"]}
    axes[0].set(title="τ by set: 95 % interval, and each seed", ylabel="τ", **ticks)


def draw_cost(report: dict[str, Any], axes: list[Any]) -> None:
    """Seconds of an optimizer step."""
    for name, entry in report["variants"].items():
        measured = entry["seconds_per_step"]
        axes[0].barh(name, measured["undisturbed"], color="C0")
        axes[0].plot(measured["per_seed_median"], [name] * len(measured["per_seed_median"]), "k.")
    axes[0].invert_yaxis()
    axes[0].set(title="seconds of an optimizer step: undisturbed ones, and each seed's median", xlabel="s")


FIGURES = {
    "curves": (draw_curves, 2),
    "positions": (draw_positions, 1),
    "sets": (draw_sets, 1),
    "cost": (draw_cost, 1),
}


def draw_figures(report: dict[str, Any], out: Path) -> list[str]:
    """Draw every figure into ``out``; returns the files' names."""
    for name, (draw, panels) in FIGURES.items():
        with figure_axes(out / f"{name}.png", 1, panels, size=(6.5 * panels + 2, 5), dpi=100) as axes:
            draw(report, axes)
    return [f"{name}.png" for name in FIGURES]
