"""Figures as text: numbers, intervals, Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NONE = "–"  # where there is no figure


def number(value: float | None, spec: str = ".3f") -> str:
    """A figure in a format specification, as ``.3f``, ``+.3f`` or ``.1%``."""
    return NONE if value is None else f"{value:{spec}}"


def interval(bounds: Sequence[float] | None, spec: str = ".3f") -> str:
    """``[low, high]``."""
    return NONE if bounds is None else f"[{bounds[0]:{spec}}, {bounds[1]:{spec}}]"


def estimate(value: float | None, bounds: Sequence[float] | None, spec: str = ".3f") -> str:
    """``value [low, high]``."""
    return NONE if value is None else f"{number(value, spec)} {interval(bounds, spec)}"


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows)]
