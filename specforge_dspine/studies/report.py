"""What the studies found, for people: Markdown tables and pictures, with the paper's numbers beside them.

The paper measured Qwen3-8B with its DFlash draft (5 layers, blocks of 16): reference, not a measurement of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specforge_dspine.studies.interventions import ALL, NONE, PREDICTED
from specforge_dspine.utils.files import atomic_write

PAPER: dict[str, dict[str, Any]] = {
    "readout": {
        "of": "the paper's Qwen3-8B-DFlash-b16 (5 layers, B = 16), 500 GSM8K training questions, selected on 100",
        "layer 5, accuracy at positions 1–4, 5–8, 9–15": [0.583, 0.337, 0.215],
    },
    "timing": {
        "of": "the paper's Qwen3-8B-DFlash-b16 (5 layers, B = 16), K8 behind six history tokens, over all predicted",
        "right in layers 2–5": {"GSM8K": 0.0623, "HumanEval": 0.0712},
        "right in layer 5 only": {"GSM8K": -0.0018, "HumanEval": 0.0026},
        "right in layers 2+5": 0.043,
        "right in layers 3+5": 0.021,
        "right in layers 4+5": 0.012,
    },
    "predecessor": {
        "of": "the paper's Qwen3-8B-DFlash-b16, accuracy of the successor, GSM8K and HumanEval",
        "fall with a predicted predecessor, mean": 0.318,
        "position 12, right and predicted": {"GSM8K": [0.935, 0.51], "HumanEval": [0.9131, 0.4878]},
        "gain with the right predecessor, predicted history": [0.14, 0.42],
        "right predecessor's key and value in layer 2 (and 5) over layer 4 (and 5)": 0.148,
    },
}
Figure = Mapping[str, Any]


def percent(figure: Figure | None, *, sign: bool = False) -> str:
    """``value [interval]`` in percent."""
    if figure is None or figure["value"] is None:
        return "–"
    form = "{:+.1%}" if sign else "{:.1%}"
    return f"{form.format(figure['value'])} [{', '.join(map(form.format, figure['interval_95']))}]"


def number(figure: Figure) -> str:
    """``value [interval]``."""
    if figure["value"] is None:
        return "–"
    low, high = figure["interval_95"]
    return f"{figure['value']:.3f} [{low:.3f}, {high:.3f}]"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, and an empty one."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)] + [""]


def header(result: Mapping[str, Any], title: str) -> list[str]:
    """What was measured, on what."""
    draft, target, samples = result["draft"], result["target"], result["samples"]
    kind = "DSpine, injection on" if draft["injection"] else "no injection"
    causal = "causal" if draft["causal"] else "bidirectional"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"# {title}",
        "",
        f"Draft `{draft['path']}` ({draft['layers']} layers, B = {draft['block_size']}, {causal} blocks, {kind}); "
        f"target `{target['model_path']}` in {target['dtype']}. "
        + "; ".join(f"{name}: {value}" for name, value in samples.items())
        + f". Intervals: {result['interval']}. Versions: {versions}.",
        "",
    ]


def notes(result: Mapping[str, Any], *studies: str) -> list[str]:
    """Remarks of the result, and the paper's numbers."""
    lines = [f"* {note}" for note in result["notes"]]
    for study in studies:
        facts = "; ".join(f"{name}: {value}" for name, value in PAPER[study].items() if name != "of")
        lines.append(f"* Reference, measured by others ({PAPER[study]['of']}): {facts}.")
    return [*lines, ""]


def readout_markdown(result: Mapping[str, Any]) -> str:
    """Accuracy by layer and group of positions."""
    groups = result["groups"]
    names = list(next(iter(groups.values())))
    rows = [[row_name(name)] + [percent(groups[group][name]) for group in groups] for name in names]
    lines = header(result, "What can be read from each layer: first choice right")
    lines += table(["", *(f"positions {group}" for group in groups)], rows)
    return "\n".join(lines + notes(result, "readout"))


def row_name(name: str) -> str:
    """Of a layer's readout, or of what the draft itself says."""
    return f"layer {name}, readout" if name.isdigit() else f"the draft's own output, {name}"


def readout_picture(path: Path, result: Mapping[str, Any]) -> None:
    """Accuracy by layer, one line per group of positions; dotted: what the draft itself says after its last layer."""
    with axes_of(path, 1, 1, (7, 5)) as (axis,):
        for index, (group, entry) in enumerate(result["groups"].items()):
            layers = [name for name in entry if name.isdigit()]
            color = f"C{index}"
            bars(
                axis, [float(name) for name in layers], [entry[name] for name in layers], color, f"positions {group}"
            )
            for name, style in (("backbone", ":"), ("refined", "--")):
                if name in entry and entry[name]["value"] is not None:
                    axis.axhline(entry[name]["value"], color=color, linestyle=style, linewidth=1)
        own = [name for name in ("backbone", "refined") if name in entry]
        axis.set_xticks([float(name) for name in layers])
        axis.set(xlabel="draft layer", ylabel="readout's first choice right", ylim=(0, None))
        styles = {"backbone": "dotted: the draft's backbone", "refined": "dashed: refined, right predecessor"}
        axis.set_title("; ".join(styles[name] for name in own), fontsize=9)
        axis.legend()


def bars(axis: Any, places: list[float], figures: list[Figure], color: str, label: str | None) -> None:
    """Points with their intervals, joined; what was not counted is left out."""
    pairs = [(x, each) for x, each in zip(places, figures, strict=True) if each["value"] is not None]
    values = [each["value"] for _, each in pairs]
    errors = [[abs(each["value"] - each["interval_95"][side]) for _, each in pairs] for side in (0, 1)]
    axis.errorbar([x for x, _ in pairs], values, errors, color=color, fmt="o-", capsize=3, label=label)


def timing_markdown(result: Mapping[str, Any]) -> str:
    """All tables of the interventions."""
    lines = header(result, "Timing and predecessor interventions")
    k, layers, block = result["history"], result["draft"]["layers"], result["draft"]["block_size"]
    timing = result["timing"]
    lines += [
        f"## Timing: {k} tokens of history, the right token at position {k + 1}; K of positions {k + 2}–{block - 1}",
        "",
        f"Of the predicted histories {percent(timing['history_wrong'])} hold a wrong token.",
        "",
    ]
    rows = []
    for output, schedules in timing["outputs"].items():
        for schedule, entry in schedules.items():
            where = entry["where_history_wrong"]
            cells = [percent(each.get("relative"), sign=True) for each in (entry, where)]
            rows.append(
                [output, schedule_text(schedule, layers), number(entry["K"]), cells[0], number(where["K"]), cells[1]]
            )
    head = ["output", "right history in", "K", "relative", "K, history wrong", "relative, history wrong"]
    lines += table(head, rows)
    lines += ["## Predecessor: accuracy of the successor, a new block at the predecessor, positions 2 to M", ""]
    lines += cases_table("history, predecessor", result["predecessor"], str)
    differences = [
        [name, *(percent(entry["differences"][name]["mean"], sign=True) for entry in result["predecessor"].values())]
        for name in result["predecessor"][ALL]["differences"]
    ]
    lines += table(["difference", *result["predecessor"]], differences)
    lines += ["## Predecessor's key and value: the right token's, in some layers, behind a predicted token", ""]
    lines += cases_table("layers", result["carried"], str)
    if "codes" in result:
        lines += ["## Predecessor's code: which the injection reads in which layers, no new block", ""]
        lines += cases_table("code, layers", result["codes"], str)
    return "\n".join(lines + notes(result, "timing", "predecessor"))


def cases_table(first: str, study: Mapping[str, Any], name: Any) -> list[str]:
    """One row a case, one column per condition; a case's difference from the reference behind its accuracy."""

    def cell(case: Figure) -> str:
        return percent(case["mean"]) + (
            f" ({percent(case['difference'], sign=True)})" if "difference" in case else ""
        )

    rows = [[name(case)] + [cell(entry["cases"][case]) for entry in study.values()] for case in study[ALL]["cases"]]
    return table([first, *study], rows)


def schedule_text(schedule: str, layers: int) -> str:
    """A schedule's name for people."""
    if schedule == NONE:
        return "none (all predicted)"
    if schedule == ALL:
        return f"layers 1–{layers} (reference)"
    return f"layers {schedule}" if "+" in schedule else f"layer {schedule}"


def timing_picture(path: Path, result: Mapping[str, Any]) -> None:
    """K relative to the all-predicted schedule, by schedule; over all blocks, and where the history was wrong."""
    outputs = result["timing"]["outputs"]
    layers = result["draft"]["layers"]
    with axes_of(path, 1, len(outputs), (7 * len(outputs), 4.5)) as axes:
        for axis, (output, schedules) in zip(axes, outputs.items(), strict=True):
            names = [name for name in schedules if name != NONE]
            for shift, color, label, find in (
                (-0.1, "C0", "all blocks", lambda each: each["relative"]),
                (0.1, "C1", "predicted history wrong", lambda each: each["where_history_wrong"]["relative"]),
            ):
                for index, schedule in enumerate(names):
                    bars(axis, [index + shift], [find(schedules[schedule])], color, label if index == 0 else None)
            axis.axhline(0, color="gray", linewidth=0.8)
            axis.set_xticks(range(len(names)), [schedule_text(name, layers) for name in names], rotation=20)
            axis.set(title=f"{output}: right history in", ylabel="K over the all-predicted schedule − 1")
            axis.legend()


def predecessor_picture(path: Path, result: Mapping[str, Any]) -> None:
    """Accuracy by position: right and predicted predecessor; what is carried in which layers; codes."""
    panels: list[tuple[str, Mapping[str, Any]]] = [
        ("history, predecessor", result["predecessor"]),
        ("key and value of the right predecessor in layers", result["carried"]),
    ]
    if "codes" in result:
        panels.append(("code, layers", result["codes"]))
    with axes_of(path, 1, len(panels), (6.5 * len(panels), 5)) as axes:
        for axis, (title, study) in zip(axes, panels, strict=True):
            for index, (case, entry) in enumerate(study[ALL]["cases"].items()):
                places = [t + 0.03 * index for t in range(2, len(entry["positions"]) + 2)]
                bars(axis, places, entry["positions"], f"C{index % 10}", case)
            axis.set(title=title, xlabel="position", ylabel="first choice right", ylim=(0, None))
            axis.legend(fontsize=8)


@contextmanager
def axes_of(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """The axes of a figure that is in the end written to ``path``, atomically."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)
    try:
        yield list(axes.flat)
        for axis in axes.flat:
            axis.grid(alpha=0.3)
        with atomic_write(path) as file:
            figure.savefig(file, format="png", dpi=110)
    finally:
        pyplot.close(figure)


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What has to be said with the interventions' figures, which are in ``result``."""
    layers, injection = result["draft"]["layers"], result["draft"]["injection"]
    found = [
        "Right tokens are the target's own greedy answer. Behind a wrong predecessor the target itself might go on "
        "differently, so part of what a predicted predecessor costs is that its right successor is another one.",
        "In the timing study the new anchor is the right token in every schedule; the paper's page leaves that open.",
        f"The {PREDICTED} tokens are the draft's proposals as it would decode them"
        + (" (refined)." if result["draft"]["refinement"] else "."),
    ]
    if layers == 2:
        found.append(
            'With 2 draft layers the timing study has one schedule: "right from layer 2 on" and "right in the last '
            'layer only" are the same, and there is no pair of later layers to compare.'
        )
    schedules = [each for output in result["timing"]["outputs"].values() for each in output.values()]
    if all(tuple(each["difference"]["interval_95"]) == (0, 0) for each in schedules if "difference" in each):
        found.append(
            "No schedule changed K on average over any draw of prompts: this draft hardly reads its history."
        )
    if layers == 1:
        found.append("With 1 draft layer, which always sees the predicted history, the timing study has no schedule.")
    if injection:
        found.append(
            "This draft has injections: at a new block's first position they read the new anchor's code in every "
            "layer, so that a right key and value are carried beside the code of the predicted token."
        )
    if injection and not result["draft"]["causal"]:
        found.append(
            "Codes: left out. In a bidirectional block right tokens would reach the slots that are to predict them."
        )
    return found
