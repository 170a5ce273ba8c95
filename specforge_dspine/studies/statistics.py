"""Figures of the studies, from the counts of every prompt.

A record holds the counts of one prompt. For the readout: how many first choices were right at every position, by
layer. For the interventions: K of every block, and whether the first choice was right at every position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specforge_dspine.evaluation import bootstrap
from specforge_dspine.evaluation.bootstrap import Estimate, Sums
from specforge_dspine.studies.interventions import ALL, NONE, PREDICTED, RIGHT, position_groups

Record = dict[str, Any]
WHOLE = "right token itself"
DIFFERENCES = {
    "fall with a predicted predecessor, right history": (f"{RIGHT}, {RIGHT}", f"{RIGHT}, {PREDICTED}"),
    "gain with the right predecessor, predicted history": (f"{PREDICTED}, {RIGHT}", f"{PREDICTED}, {PREDICTED}"),
    "right predecessor alone over right history alone": (f"{PREDICTED}, {RIGHT}", f"{RIGHT}, {PREDICTED}"),
}
"""Accuracy of the first minus accuracy of the second, each "history, predecessor"."""


def ratio(a: Sums) -> dict[str, Any]:
    """Σ counted / Σ all, with ``count`` Σ all."""
    return as_figure(bootstrap.ratio([a])) | {"count": int(a[1].sum())}


def difference(a: Sums, b: Sums) -> dict[str, Any]:
    """ratio(a) − ratio(b)."""
    return as_figure(bootstrap.difference([a], [b]))


def relative(a: Sums, b: Sums) -> dict[str, Any]:
    """ratio(a) / ratio(b) − 1."""
    return as_figure(bootstrap.relative([a], [b]))


def as_figure(found: Estimate) -> dict[str, Any]:
    """As result files hold it; a single prompt always draws itself."""
    single = None if found.value is None else (found.value, found.value)
    return {"value": found.value, "interval_95": found.interval or single}


def readout_figures(counts: Sequence[Mapping[str, np.ndarray]], block: int) -> dict[str, Any]:
    """Accuracy of layers and own outputs by group of positions; ``counts``: of ``readout.count_right``, by prompt."""
    names = [name for name in counts[0] if name != "count"]
    stacked = {name: np.stack([each[name] for each in counts]) for name in (*names, "count")}  # [P, M]

    def accuracies(columns: Sequence[int]) -> dict[str, Any]:
        total = stacked["count"][:, columns].sum(axis=1)
        return {name: ratio((stacked[name][:, columns].sum(axis=1), total)) for name in names}

    return {
        "groups": {name: accuracies([t - 1 for t in group]) for name, group in position_groups(block).items()},
        "positions": {str(t): accuracies([t - 1]) for t in range(1, block)},
    }


def intervention_figures(records: Sequence[Record], block: int) -> dict[str, Any]:
    """All figures of the interventions, from the records of the prompts that have blocks."""
    found = {
        "blocks": sum(record["blocks"] for record in records),
        "timing": timing_figures(records),
        "predecessor": predecessor_figures(records),
        "carried": flag_figures(with_reference(records), "carried", NONE),
    }
    if "codes" in records[0]:
        found["codes"] = flag_figures(records, "codes", NONE)
    return found


def timing_figures(records: Sequence[Record]) -> dict[str, Any]:
    """K of every output and schedule, over all blocks and over those whose predicted history is wrong somewhere."""
    wrong = [np.array(record["history_wrong"], dtype=bool) for record in records]

    def figures(lengths: Sequence[Mapping[str, Any]], schedule: str, chosen: Sequence[np.ndarray]) -> dict[str, Any]:
        own, reference = (masked_sums([each[name] for each in lengths], chosen) for name in (schedule, NONE))
        found = {"K": ratio(own)}
        if schedule != NONE:
            found["difference"] = difference(own, reference)
            found["relative"] = relative(own, reference)
        return found

    every = [np.ones_like(each) for each in wrong]
    outputs: dict[str, Any] = {}
    for output, schedules in records[0]["timing"].items():
        lengths = [record["timing"][output] for record in records]
        outputs[output] = {
            name: figures(lengths, name, every) | {"where_history_wrong": figures(lengths, name, wrong)}
            for name in schedules
        }
    return {"history_wrong": ratio(masked_sums(wrong, every)), "outputs": outputs}


def predecessor_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Accuracy of the successor by history and predecessor, and the differences that matter."""
    found = flag_figures(records, "predecessor", None)
    for where, chosen in conditions(records).items():
        differences = found[where]["differences"] = {}
        for name, pair in DIFFERENCES.items():
            a, b = (flag_sums(records, "predecessor", case, chosen) for case in pair)
            positions = [difference(x, y) for x, y in zip(by_position(a), by_position(b), strict=True)]
            differences[name] = {"mean": difference(summed(a), summed(b)), "positions": positions}
    return found


def flag_figures(records: Sequence[Record], study: str, reference: str | None) -> dict[str, Any]:
    """Accuracy of every case of ``study`` at positions 2 .. M and over all of them, under each condition; with a
    ``reference`` case also the difference from it."""
    found: dict[str, Any] = {}
    for where, chosen in conditions(records).items():
        cases: dict[str, Any] = {}
        for case in records[0][study]:
            sums = flag_sums(records, study, case, chosen)
            cases[case] = {"mean": ratio(summed(sums)), "positions": [ratio(each) for each in by_position(sums)]}
            if reference is not None and case != reference:
                base = flag_sums(records, study, reference, chosen)
                cases[case]["difference"] = difference(summed(sums), summed(base))
        found[where] = {"cases": cases}
    return found


def conditions(records: Sequence[Record]) -> dict[str, list[np.ndarray]]:
    """Which blocks and positions [N, M − 1] (bool) count under each condition, by prompt."""
    right = [np.array(record["predecessor_right"], dtype=bool) for record in records]
    return {
        ALL: [np.ones_like(each) for each in right],
        "predicted predecessor wrong": [~each for each in right],
        "predicted predecessor right": right,
    }


def flag_sums(records: Sequence[Record], study: str, case: str, chosen: Sequence[np.ndarray]) -> Sums:
    """How many choices are right among those that count, and how many count, [P, M − 1] each."""
    return masked_sums([record[study][case] for record in records], chosen)


def masked_sums(values: Sequence[Any], chosen: Sequence[np.ndarray]) -> Sums:
    """Σ over the blocks of every prompt's ``values`` [N, ..] where ``chosen`` [N, ..], and how many those are."""
    counted = [(np.array(each) * at).sum(axis=0) for each, at in zip(values, chosen, strict=True)]
    return np.stack(counted).astype(float), np.stack([at.sum(axis=0) for at in chosen]).astype(float)


def summed(sums: Sums) -> Sums:
    """Over positions: [P, n] → [P]."""
    return sums[0].sum(axis=1), sums[1].sum(axis=1)


def by_position(sums: Sums) -> list[Sums]:
    """[P, n] → n times [P]."""
    return list(zip(sums[0].T, sums[1].T, strict=True))


def with_reference(records: Sequence[Record]) -> list[Record]:
    """``carried`` with two cases of ``predecessor`` around it: nothing carried, and the right token itself."""

    def between(study: Mapping[str, Any], carried: Mapping[str, Any]) -> dict[str, Any]:
        return {NONE: study[f"{RIGHT}, {PREDICTED}"], **carried, WHOLE: study[f"{RIGHT}, {RIGHT}"]}

    return [record | {"carried": between(record["predecessor"], record["carried"])} for record in records]
