"""Pages and figures of the studies: Markdown tables and plots, with the paper's numbers beside them.

The paper measured Qwen3-8B with its DFlash draft (5 layers, blocks of 16). Its numbers are for reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.studies.interventions import ALL, BACKBONE, NONE, PREDICTED, REFINED
from specforge_dspine.utils.figures import draw_estimates, figure_axes
from specforge_dspine.utils.files import atomic_write, write_json
from specforge_dspine.utils.tables import estimate, markdown_table

PAPER: dict[str, dict[str, Any]] = {
    "readout": {
        "of": "the paper's Qwen3-8B-DFlash-b16 (5 layers, B = 16), 500 GSM8K training questions, selected on 100",
        "layer 5, accuracy at positions 1–4, 5–8, 9–15": [0.583, 0.337, 0.215],
    },
    "timing": {
        "of": "the paper's Qwen3-8B-DFlash-b16 (5 layers, B = 16), K8 after six history tokens, over all predicted",
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
WRONG = "where_history_wrong"  # entry of a schedule
Result = Mapping[str, Any]


def cell(figure: Result | None, spec: str = ".1%") -> str:
    """A figure with its interval."""
    return estimate(None, None) if figure is None else estimate(figure["value"], figure["interval_95"], spec)


def page(title: str, result: Result, sections: Sequence[Sequence[str]], papers: Sequence[str]) -> str:
    """A page: what was measured, the sections (lines each), remarks, and the paper's numbers."""
    draft, target = result["draft"], result["target"]
    kind = "DSpine, injection on" if draft["injection"] else "no injection"
    causal = "causal" if draft["causal"] else "bidirectional"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    samples = "; ".join(f"{name}: {value}" for name, value in result["samples"].items())
    lines = [
        f"# {title}",
        "",
        f"Draft `{draft['path']}` ({draft['layers']} layers, B = {draft['block_size']}, {causal} blocks, {kind}); "
        f"target `{target['model_path']}` in {target['dtype']}. {samples}. Intervals: {result['interval']}. "
        f"Versions: {versions}.",
    ]
    for section in sections:
        lines += ["", *section]
    lines += ["", *(f"* {note}" for note in result["notes"])]
    for study in papers:
        facts = "; ".join(f"{name}: {plain(value)}" for name, value in PAPER[study].items() if name != "of")
        lines.append(f"* Reference, measured by others ({PAPER[study]['of']}): {facts}.")
    return "\n".join([*lines, ""])


def plain(value: Any) -> str:
    """A number, several, or several by name, as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(each)}" for name, each in value.items())
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def write_results(out: Path, name: str, result: Result, text: str) -> str:
    """Write a study's JSON and its page ``text``; returns what to print."""
    write_json(out / f"{name}.json", result)
    with atomic_write(out / f"{name}.md") as file:
        file.write(text.encode())
    return f"{text}\nwritten: {out}"


def readout_markdown(result: Result) -> str:
    """The page of the readout study: accuracy by layer and group of positions."""
    groups = result["groups"]
    names = {
        name: f"layer {name}, readout" if name.isdigit() else f"the draft's own output, {name}"
        for name in next(iter(groups.values()))
    }
    rows = [[text, *(cell(group[name]) for group in groups.values())] for name, text in names.items()]
    table = markdown_table(["", *(f"positions {group}" for group in groups)], rows)
    return page("What can be read from each layer: first choice right", result, [table], ["readout"])


def draw_readout(path: Path, result: Result) -> None:
    """Accuracy by layer, one line per group of positions; horizontal lines are the draft's own outputs."""
    styles = {BACKBONE: (":", "dotted: the draft's backbone"), REFINED: ("--", "dashed: refined, right predecessor")}
    with figure_axes(path, size=(7, 5)) as (axis,):
        for index, (group, entry) in enumerate(result["groups"].items()):
            color, layers = f"C{index}", [name for name in entry if name.isdigit()]
            accuracies, places = [entry[name] for name in layers], [int(name) for name in layers]
            draw_estimates(axis, places, accuracies, color=color, fmt="o-", capsize=3, label=f"positions {group}")
            own = {name: style for name, style in styles.items() if name in entry}
            for name, (linestyle, _) in own.items():
                if entry[name]["value"] is not None:
                    axis.axhline(entry[name]["value"], color=color, linestyle=linestyle, linewidth=1)
        axis.set(xlabel="draft layer", ylabel="readout's first choice right", ylim=(0, None), xticks=places)
        axis.set_title("; ".join(text for _, text in own.values()), fontsize=9)


def timing_markdown(result: Result) -> str:
    """The page of the timing study: all tables of the interventions."""
    k, layers, block = result["history"], result["draft"]["layers"], result["draft"]["block_size"]
    timing, predecessor = result["timing"], result["predecessor"]
    rows = []
    for output, schedules in timing["outputs"].items():
        for schedule, entry in schedules.items():
            pairs = [(cell(each["K"], ".3f"), cell(each.get("relative"), "+.1%")) for each in (entry, entry[WRONG])]
            rows.append([output, schedule_text(schedule, layers), *pairs[0], *pairs[1]])
    header = ["output", "right history in", "K", "relative", "K, history wrong", "relative, history wrong"]
    differences = [
        [name, *(cell(entry["differences"][name]["mean"], "+.1%") for entry in predecessor.values())]
        for name in predecessor[ALL]["differences"]
    ]
    sections = [
        [
            f"## Timing: {k} tokens of history, the right token at position {k + 1}; "
            f"K of positions {k + 2}–{block - 1}",
            "",
            f"Of the predicted histories {cell(timing['history_wrong'])} hold a wrong token.",
        ],
        markdown_table(header, rows),
        ["## Predecessor: accuracy of the successor, a new block at the predecessor, positions 2 to M"],
        cases_table("history, predecessor", predecessor),
        markdown_table(["difference", *predecessor], differences),
        ["## Predecessor's key and value: the right token's, in some layers, after a predicted token"],
        cases_table("layers", result["carried"]),
    ]
    if "codes" in result:
        sections.append(["## Predecessor's code: which one the injection reads in which layers, no new block"])
        sections.append(cases_table("code, layers", result["codes"]))
    return page("Timing and predecessor interventions", result, sections, ["timing", "predecessor"])


def cases_table(first: str, study: Result) -> list[str]:
    """One line per case, one column per condition; in parentheses a case's difference from the reference."""

    def accuracy(case: Result) -> str:
        difference = f" ({cell(case['difference'], '+.1%')})" if "difference" in case else ""
        return cell(case["mean"]) + difference

    rows = [[case, *(accuracy(entry["cases"][case]) for entry in study.values())] for case in study[ALL]["cases"]]
    return markdown_table([first, *study], rows)


def schedule_text(schedule: str, layers: int) -> str:
    """A schedule's name on a page."""
    if schedule == NONE:
        return "none (all predicted)"
    if schedule == ALL:
        return f"layers 1–{layers} (reference)"
    return f"layers {schedule}" if "+" in schedule else f"layer {schedule}"


def draw_timing(path: Path, result: Result) -> None:
    """K relative to the all-predicted schedule, by schedule; over all blocks, and where the history was wrong."""
    outputs = result["timing"]["outputs"]
    with figure_axes(path, 1, len(outputs), size=(7 * len(outputs), 4.5)) as axes:
        for axis, (output, schedules) in zip(axes, outputs.items(), strict=True):
            entries = {name: entry for name, entry in schedules.items() if name != NONE}
            texts = [schedule_text(name, result["draft"]["layers"]) for name in entries]
            for shift, label in ((-0.1, "all blocks"), (0.1, "predicted history wrong")):
                figures = [(each if shift < 0 else each[WRONG])["relative"] for each in entries.values()]
                places = [index + shift for index in range(len(figures))]
                draw_estimates(axis, places, figures, fmt="o", capsize=3, label=label)
            axis.axhline(0, color="gray", linewidth=0.8)
            axis.set_xticks(range(len(texts)), texts, rotation=20)
            axis.set(title=f"{output}: right history in", ylabel="K over the all-predicted schedule − 1")


def draw_predecessor(path: Path, result: Result) -> None:
    """Accuracy by position: right and predicted predecessor; what is carried in which layers; codes."""
    panels = {
        "history, predecessor": "predecessor",
        "key and value of the right predecessor in layers": "carried",
        "code, layers": "codes",
    }
    shown = {title: result[name][ALL]["cases"] for title, name in panels.items() if name in result}
    with figure_axes(path, 1, len(shown), size=(6.5 * len(shown), 5)) as axes:
        for axis, (title, cases) in zip(axes, shown.items(), strict=True):
            for index, (case, entry) in enumerate(cases.items()):
                places = [t + 0.03 * index for t in range(2, len(entry["positions"]) + 2)]
                style = {"color": f"C{index % 10}", "fmt": "o-", "capsize": 3}
                draw_estimates(axis, places, entry["positions"], label=case, **style)
            axis.set(title=title, xlabel="position", ylabel="first choice right", ylim=(0, None))


def remarks(result: Result) -> list[str]:
    """What readers of the interventions' figures need to know, for this draft."""
    layers, injection = result["draft"]["layers"], result["draft"]["injection"]
    lines = [
        "Right tokens are the target's own greedy response. After a wrong predecessor the target itself might go on "
        "differently, so part of the cost of a predicted predecessor is that another successor is right.",
        "In the timing study the new anchor is the right token in every schedule; the paper does not specify it.",
        f"The {PREDICTED} tokens are the draft's proposals as it would decode them"
        + (" (refined)." if result["draft"]["refinement"] else "."),
    ]
    if layers == 1:
        lines.append("With 1 draft layer, which always sees the predicted history, the timing study has no schedule.")
    if layers == 2:
        lines.append(
            'With 2 draft layers the timing study has one schedule: "right from layer 2 on" and "right in the last '
            'layer only" are the same, and there is no pair of later layers to compare.'
        )
    schedules = [each for output in result["timing"]["outputs"].values() for each in output.values()]
    if all(tuple(each["difference"]["interval_95"]) == (0, 0) for each in schedules if "difference" in each):
        lines.append(
            "No schedule changed K on average over any draw of prompts: this draft hardly reads its history."
        )
    if injection:
        lines.append(
            "This draft has injections. At a new block's first position they read the new anchor's code in every "
            "layer, so a right key and value are carried beside the code of the predicted token."
        )
    if injection and not result["draft"]["causal"]:
        lines.append(
            "Codes: left out. In a bidirectional block right tokens would reach the slots that are to predict them."
        )
    return lines
