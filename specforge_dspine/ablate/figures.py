"""Pictures of an ablation, drawn from its report: curves, τ by position, τ by set, cost of a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

LEAST = 1e-4  # of a logarithmic axis
LABELS = {"ce": "backbone's cross-entropy", "tau": "simulated τ, teacher forced"}


def banded(axis: Axes, steps: list[int], seeds: np.ndarray, label: str) -> None:
    """The mean over seeds [S, n] as a line, their range as a band."""
    (line,) = axis.plot(steps, seeds.mean(axis=0), "o-", markersize=3, label=label)
    axis.fill_between(steps, seeds.min(axis=0), seeds.max(axis=0), color=line.get_color(), alpha=0.15)


def curves(report: dict[str, Any], axes: list[Axes]) -> None:
    """Training curves."""
    for axis, name in zip(axes, LABELS, strict=True):
        for variant, entry in report["variants"].items():
            seeds = entry["curves"][name]
            values = np.array([list(each.values()) for each in seeds])
            banded(axis, [int(step) for step in seeds[0]], values, variant)
        axis.set(title=LABELS[name], xlabel="optimizer step", yscale="log" if name == "ce" else "linear")


def positions(report: dict[str, Any], axes: list[Axes]) -> None:
    """Share of rounds that accepted up to a position, all sets together."""
    for variant, entry in report["variants"].items():
        shares = np.array(entry["acceptance_by_position"], dtype=float)  # None: no round got there
        banded(axes[0], list(range(1, shares.shape[1] + 1)), np.maximum(shares, LEAST), variant)
    title = f"share of rounds accepted up to position (none: drawn at {LEAST})"
    axes[0].set(title=title, xlabel="position in the block", yscale="log")


def by_set(report: dict[str, Any], axes: list[Axes]) -> None:
    """τ of every set with its interval; the points are the seeds."""
    variants = report["variants"]
    sets = [*report["inputs"]["sets"], "mean over sets"]
    width = 0.8 / len(variants)
    for k, (variant, entry) in enumerate(variants.items()):
        found = [*(entry["tau"][name] for name in sets[:-1]), entry["tau_mean_over_sets"]]
        places = np.arange(len(sets)) + (k - (len(variants) - 1) / 2) * width
        values = np.array([each["value"] for each in found])
        errors = np.abs(np.array([each["interval_95"] for each in found]).T - values)
        axes[0].errorbar(places, values, errors, fmt="_", markersize=9, capsize=2, label=variant)
        for place, each in zip(places, found, strict=True):
            axes[0].plot(
                [place] * len(each["per_seed"]), each["per_seed"], ".", color="black", markersize=3, alpha=0.6
            )
    axes[0].set(title="τ by set: 95 % interval, and each seed", ylabel="τ", xticks=range(len(sets)), xticklabels=sets)


def cost(report: dict[str, Any], axes: list[Axes]) -> None:
    """Seconds of an optimizer step."""
    for name, entry in report["variants"].items():
        measured = entry["seconds_per_step"]
        axes[0].barh(name, measured["undisturbed"], color="C0")
        axes[0].plot(measured["per_seed_median"], [name] * len(measured["per_seed_median"]), "k.")
    axes[0].invert_yaxis()
    axes[0].set(title="seconds of an optimizer step: undisturbed ones, and each seed's median", xlabel="s")


FIGURES = {"curves": (curves, 2), "positions": (positions, 1), "sets": (by_set, 1), "cost": (cost, 1)}


def draw_all(report: dict[str, Any], out: Path) -> list[str]:
    """Every picture, written into ``out`` atomically; returns the files' names."""
    written = []
    for name, (draw, panels) in FIGURES.items():
        figure, axes = pyplot.subplots(
            1, panels, figsize=(6.5 * panels + 2, 5), constrained_layout=True, squeeze=False
        )
        draw(report, list(axes[0]))
        for axis in axes[0]:
            axis.grid(alpha=0.3)
        if name != "cost":
            axes[0, -1].legend(fontsize=8)
        path = out / f"{name}.png"
        partial = path.with_name(f".{path.name}.{os.getpid()}.png")
        figure.savefig(partial, dpi=100)
        os.replace(partial, path)
        pyplot.close(figure)
        written.append(path.name)
    return written
