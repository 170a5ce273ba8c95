"""The page of an ablation, ablation.md: tables of τ, orderings with their intervals, and the paper's numbers.

The paper's numbers are labeled as such: another model, other data, another budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.ablate.statistics import REVERSED, SHOWS, UNRESOLVED
from specforge_dspine.utils.tables import estimate, interval, markdown_table, number

UNDISTURBED = 0.05  # quantile of a step's seconds
TABLES = {
    "Table 2: what the parts add": ("full", "no-refinement", "no-injection", "dflash"),
    "Table 3: layer supervision of a plain DFlash backbone": ("dflash-none", "dflash-ce", "dflash-cosine"),
}
PAPER_SETS = ("MATH-500", "MBPP", "MT-Bench")
PAPER = {
    "full": (5.49, 4.98, 4.11),
    "no-refinement": (5.11, 4.65, 3.82),
    "no-injection": (4.93, 4.54, 3.67),
    "dflash-none": (3.75, 3.48, 2.91),
    "dflash-ce": (3.67, 3.40, 2.84),
    "dflash-cosine": (3.85, 3.63, 2.99),
}
PAPER_LABEL = "paper, Qwen3-8B, other data and budget"
PAPER_DFLASH = (
    "For plain DFlash the paper only gives the mean over its seven sets: 3.77, and 4.82 for the full method."
)
NOT_GIVEN = "not given"


def joined(values: Iterable[float], spec: str, separator: str = " ") -> str:
    """Several figures in one cell."""
    return separator.join(number(value, spec) for value in values)


def tau_table(report: dict[str, Any], names: Iterable[str]) -> list[str]:
    """τ of some variants, set by set, with the paper's beside them."""
    sets = list(report["inputs"]["sets"])
    rows = []
    for name in names:
        entry = report["variants"][name]
        by_set = [estimate(entry["tau"][each]["value"], entry["tau"][each]["interval_95"]) for each in sets]
        mean = entry["tau_mean_over_sets"]
        paper = joined(PAPER[name], ".2f", " / ") if name in PAPER else NOT_GIVEN
        summary = (f"**{number(mean['value'])}**", interval(mean["interval_95"]), joined(mean["per_seed"], ".3f"))
        rows.append([name, *by_set, *summary, paper])
    label = f"{PAPER_LABEL}: {' / '.join(PAPER_SETS)}"
    return markdown_table(["variant", *sets, "mean over sets", "95 %", "each seed's mean", label], rows)


def ordering_table(report: dict[str, Any]) -> list[str]:
    """The orderings: difference, interval, seeds, verdict."""
    sets = list(report["inputs"]["sets"])
    rows = []
    for entry in report["orderings"]:
        by_set = [
            f"{estimate(each['value'], each['interval_95'], '+.3f')}, {each['verdict']}"
            for each in (entry["by_set"][name] for name in sets)
        ]
        value, bounds, per_seed = entry["difference"].values()
        summary = (number(value, "+.3f"), interval(bounds, "+.3f"), joined(per_seed, "+.3f"))
        paper = joined(entry["paper"].values(), "+.2f", " / ") if "paper" in entry else NOT_GIVEN
        rows.append([f"{entry['above']} > {entry['below']}", *summary, f"**{entry['verdict']}**", *by_set, paper])
    header = ["ordering", "Δτ, mean over sets", "95 %", "each seed", "verdict", *(f"Δτ {each}" for each in sets)]
    return markdown_table([*header, "paper"], rows)


def cost_table(report: dict[str, Any]) -> list[str]:
    """Seconds per optimizer step."""
    costs = {name: entry["seconds_per_step"] for name, entry in report["variants"].items()}
    rows = [
        [name, number(cost["undisturbed"], ".2f"), joined(cost["per_seed_median"], ".2f")]
        for name, cost in costs.items()
    ]
    return markdown_table(["variant", "undisturbed s/step", "median of each seed"], rows)


def introduction(report: dict[str, Any], machines: str) -> list[str]:
    """What was trained and evaluated, and how to read the intervals."""
    inputs = report["inputs"]
    recipe, training = inputs["recipe"], inputs["recipe"]["training"]
    seeds = sorted({seed for entry in report["variants"].values() for seed in entry["seeds"]})
    steps = sorted({entry["steps"] for entry in report["variants"].values()})
    draft = next(iter(inputs["variants"].values()))
    sets = ", ".join(f"{name} ({each['prompts']} prompts)" for name, each in inputs["sets"].items())
    lines = [
        "# Ablation",
        *("", *([report["note"], ""] if report["note"] else [])),
        f"Every variant trained with the seeds {', '.join(map(str, seeds))} for "
        f"{' or '.join(map(str, steps))} optimizer steps of {training['batch_size']} × {training['num_anchors']} "
        f"anchors, on {inputs['data'].partition(' of ')[0]}; L = {draft['num_hidden_layers']}, "
        f"B = {draft['block_size']}, K = {draft['top_k']}, {recipe['model']['torch_dtype']}. "
        "τ is response tokens per round, greedy, with at most "
        f"{inputs['max_new_tokens']} tokens per response. Sets: {sets}. Machine: {machines}.",
        "",
        f"Intervals are 95 %: {report['interval']}. Seeds are few, so each one's value is listed. An ordering "
        "\"shows\" only if both its interval and Student's 95 % interval over the seeds' differences exclude 0; "
        '"reversed" is the same with the other sign; everything else is "not resolved".',
    ]
    if report["not_finished"]:
        lines += ["", f"Not finished, and left out: {'; '.join(report['not_finished'])}."]
    return lines


def markdown(report: dict[str, Any], figures: Sequence[str]) -> str:
    """ablation.md."""
    machines = "; ".join(
        f"{each['processor']}, runs in parallel: {each['max_parallel']}, threads of each: {each['threads']}"
        for each in report["machine"]
    )
    lines = introduction(report, machines)
    others = tuple(name for name in report["variants"] if not any(name in names for names in TABLES.values()))
    for title, names in (TABLES | {"Other variants": others}).items():
        if present := [name for name in names if name in report["variants"]]:
            lines += ["", f"## {title}", "", *tau_table(report, present)]
            lines += ["", PAPER_DFLASH] if "dflash" in present else []
    if report["orderings"]:
        lines += ["", "## Do the paper's orderings show?", ""]
        for word in (SHOWS, REVERSED, UNRESOLVED):
            named = [f"{each['above']} > {each['below']}" for each in report["orderings"] if each["verdict"] == word]
            lines += [f"* {word}: {', '.join(named)}"] if named else []
        last = f"The last column: {PAPER_LABEL}; {' / '.join(PAPER_SETS)}. The bold verdicts are the ones to go by."
        lines += ["", *ordering_table(report), "", last]
    lines += [
        *("", "## Cost of a step", ""),
        f"Seconds of an optimizer step, measured during the training runs: {machines}. Other work on the machine "
        f"only adds to it, so the first column is the {UNDISTURBED:.0%} quantile over all seeds' steps. A step has "
        "the same supervised positions in every variant. For ratios see `make bench`, which measures in one process.",
        *("", *cost_table(report)),
        *("", "## Figures", ""),
        "Each point of a curve is the mean over a twentieth of the training; the line is the seeds' mean, the band "
        "their range. During the curriculum, some blocks of the variants with injection get right predecessors.",
        *("", *(f"![{Path(name).stem}]({name})\n" for name in figures)),
    ]
    return "\n".join(lines).rstrip() + "\n"
