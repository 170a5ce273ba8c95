"""Figures as PNG files: axes to draw on, saved atomically; points with their intervals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specforge_dspine.utils.files import atomic_write


@contextlib.contextmanager
def figure_axes(
    path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], title: str = "", dpi: int = 110
) -> Iterator[list[Any]]:
    """Axes of a figure, row by row; it is saved as ``path`` when the context ends without an error.

    ``size`` is in inches. Axes with labeled lines get a legend, and all get a grid.
    """
    import matplotlib  # an optional dependency

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)
    if title:
        figure.suptitle(title)
    try:
        yield list(axes.flat)
        for axis in axes.flat:
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        with atomic_write(path) as file:
            figure.savefig(file, format="png", dpi=dpi)
    finally:
        pyplot.close(figure)


def draw_estimates(axis: Any, places: Iterable[float], estimates: Iterable[Mapping[str, Any]], **style: Any) -> None:
    """Draw each ``value`` with its ``interval_95``; estimates without a value are left out."""
    pairs = [(x, each) for x, each in zip(places, estimates, strict=True) if each["value"] is not None]
    values = [each["value"] for _, each in pairs]
    errors = [[abs(each["value"] - each["interval_95"][side]) for _, each in pairs] for side in (0, 1)]
    axis.errorbar([x for x, _ in pairs], values, errors, **style)
