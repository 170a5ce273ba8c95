"""The page of an ablation, ablation.md: tables, orderings with their intervals, the paper's own numbers beside ours.

The paper's are marked as such: another model, other data, another budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.ablate.statistics import REVERSED, SHOWS, UNRESOLVED

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
    "Of plain DFlash the paper gives the mean over its seven sets alone: 3.77, and 4.82 for the full method."
)


def interval(low_high: Sequence[float], sign: str = "") -> str:
    """``low … high``."""
    return " … ".join(f"{each:{sign}.3f}" for each in low_high)


def row(*cells: object) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def tau_table(report: dict[str, Any], names: Iterable[str]) -> list[str]:
    """τ of some variants, set by set, with the paper's beside them."""
    sets = list(report["inputs"]["sets"])
    lines = [
        row(
            "variant", *sets, "mean over sets", "95 %", "each seed's mean", f"{PAPER_LABEL}: {' / '.join(PAPER_SETS)}"
        ),
        row(*["---"] * (len(sets) + 5)),
    ]
    for name in names:
        entry = report["variants"][name]
        mean = entry["tau_mean_over_sets"]
        cells = [
            f"{entry['tau'][each]['value']:.3f} ({interval(entry['tau'][each]['interval_95'])})" for each in sets
        ]
        seeds = " ".join(f"{each:.3f}" for each in mean["per_seed"])
        paper = " / ".join(f"{each:.2f}" for each in PAPER[name]) if name in PAPER else "not given"
        lines.append(row(name, *cells, f"**{mean['value']:.3f}**", interval(mean["interval_95"]), seeds, paper))
    return lines


def ordering_table(report: dict[str, Any]) -> list[str]:
    """The orderings: difference, interval, seeds, verdict."""
    sets = list(report["inputs"]["sets"])
    lines = [
        row(
            "ordering",
            "Δτ, mean over sets",
            "95 %",
            "each seed",
            "verdict",
            *(f"Δτ {each}" for each in sets),
            "paper",
        ),
        row(*["---"] * (len(sets) + 6)),
    ]
    for entry in report["orderings"]:
        found = entry["difference"]
        by_set = [
            f"{each['value']:+.3f} ({interval(each['interval_95'], '+')}), {each['verdict']}"
            for each in (entry["by_set"][name] for name in sets)
        ]
        paper = " / ".join(f"{each:+.2f}" for each in entry["paper"].values()) if "paper" in entry else "not given"
        lines.append(
            row(
                f"{entry['above']} > {entry['below']}",
                f"{found['value']:+.3f}",
                interval(found["interval_95"], "+"),
                " ".join(f"{each:+.3f}" for each in found["per_seed"]),
                f"**{entry['verdict']}**",
                *by_set,
                paper,
            )
        )
    return lines


def cost_table(report: dict[str, Any]) -> list[str]:
    """Seconds per optimizer step."""
    lines = [
        row("variant", "undisturbed s/step", "median of each seed"),
        row(*["---"] * 3),
    ]
    for name, entry in report["variants"].items():
        least = entry["seconds_per_step"]["undisturbed"]
        seeds = " ".join(f"{each:.2f}" for each in entry["seconds_per_step"]["per_seed_median"])
        lines.append(row(name, f"{least:.2f}", seeds))
    return lines


def markdown(report: dict[str, Any], pictures: Sequence[str]) -> str:
    """ablation.md."""
    inputs = report["inputs"]
    recipe, training = inputs["recipe"], inputs["recipe"]["training"]
    seeds = sorted({seed for entry in report["variants"].values() for seed in entry["seeds"]})
    steps = sorted({entry["steps"] for entry in report["variants"].values()})
    shape = next(iter(inputs["variants"].values()))
    machines = "; ".join(
        f"{each['processor']}, runs side by side: {each['at_once']}, threads of each: {each['threads']}"
        for each in report["machine"]
    )
    sets = ", ".join(f"{name} ({each['prompts']} prompts)" for name, each in inputs["sets"].items())
    lines = [
        "# Ablation",
        *("", *([report["note"], ""] if report["note"] else [])),
        f"Every variant trained with the seeds {', '.join(map(str, seeds))} for "
        f"{' or '.join(map(str, steps))} optimizer steps of {training['batch_size']} × {training['num_anchors']} "
        f"anchors, on {inputs['data'].partition(' of ')[0]}; L = {shape['num_hidden_layers']}, "
        f"B = {shape['block_size']}, K = {shape['top_k']}, {recipe['model']['torch_dtype']}. "
        "τ is answer tokens per round, greedy, at most "
        f"{inputs['max_new_tokens']} tokens an answer; sets: {sets}. Machine: {machines}.",
        "",
        f"Intervals are 95 %: {report['interval']}. Seeds are few, so each one's value is listed, and "
        "an ordering \"shows\" only if its interval and Student's 95 % interval over the seeds' differences both "
        'leave 0 out; "reversed" is the same with the other sign; everything else is "not resolved".',
    ]
    if report["not_finished"]:
        lines += ["", f"Not finished, and left out: {'; '.join(report['not_finished'])}."]
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
        lines += ["", *ordering_table(report)]
        lines += [
            "",
            f"The last column: {PAPER_LABEL}; {' / '.join(PAPER_SETS)}. The bold verdicts are the ones to go by.",
        ]
    lines += [
        *("", "## Cost of a step", ""),
        f"Seconds of an optimizer step, as measured while the runs trained: {machines}. Other work on the machine "
        f"only ever adds to it, so the first column is the {UNDISTURBED:.0%} quantile over all seeds' steps. A step "
        "has the same rows in every variant. Read no ratios out of it: make bench measures those, in one process.",
        *("", *cost_table(report)),
        *("", "## Pictures", ""),
        "Curves are means over twentieths of the training; the line is the seeds' mean, the band their range. While "
        "the curriculum lasts, some blocks of the variants with injection are given right predecessors.",
        *("", *(f"![{Path(name).stem}]({name})\n" for name in pictures)),
    ]
    return "\n".join(lines).rstrip() + "\n"
