"""Compare evaluations: one report.json and a picture.

    python -m specforge_dspine.report --evaluations refined=DIR unrefined=DIR .. --out DIR [--run DIR]

Each folder is what specforge_dspine.evaluate wrote at one temperature; its name is used in the report. With "refined"
and "unrefined" among them, both of one draft on the same prompts, the report gives what the refinement adds to τ.
report.json holds every round's tokens, so that all figures can be recomputed from it (fields: docs/metrics.md).
--run adds the training run's curves to the picture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import field_validator

from specforge_dspine.evaluation.comparison import compare
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.files import atomic_write, read_jsonl
from specforge_dspine.utils.tables import estimate, markdown_table, number

COLUMNS = ("evaluation", "temperature", "τ", "rounds", "prompts")


class ReportOptions(Options):
    """Options of the command."""

    evaluations: tuple[str, ...] = option("names and folders of evaluations", metavar="NAME=DIR")
    out: Path = option("folder of the report")
    run: Path | None = option("training run whose curves to draw", default=None)

    @field_validator("evaluations")
    @classmethod
    def check_names(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse words without a name or a folder, and names that occur twice."""
        names = [word.partition("=")[0] for word in words if all(word.partition("="))]
        if len(set(names)) < len(words):
            raise ValueError("give each as NAME=DIR, with different names")
        return words


def make_report(options: ReportOptions) -> str:
    """Write report.json and report.png; returns a table of the figures.

    Raises:
        ValueError: as ``compare``.
    """
    report = compare(
        {name: Path(folder) for name, _, folder in (word.partition("=") for word in options.evaluations)}
    )
    metrics: list[dict[str, float]] = []
    if options.run is not None:  # lines without a loss are of held-out samples
        metrics = [line for line in read_jsonl(options.run / "metrics.jsonl") if "loss" in line]
    with atomic_write(options.out / "report.json") as file:
        file.write(json.dumps(report).encode())  # on one line: most of it is ids
    with atomic_write(options.out / "report.png") as file:
        draw(report, metrics).savefig(file, dpi=110)
    lines = [
        (
            name,
            f"{entry['temperature']:g}",
            estimate(entry["tau"], entry["tau_interval_95"]),
            *(entry["rounds"], entry["prompts"]),
        )
        for name, entry in report["variants"].items()
    ]
    text = markdown_table(COLUMNS, lines)
    if "refinement_gain" in report:
        text.append(f"\nThe refinement adds {gain_text(report)} to τ.")
    return "\n".join([*text, f"wrote {options.out / 'report.json'} and {options.out / 'report.png'}"])


def gain_text(report: dict[str, Any]) -> str:
    """What the refinement adds to τ, with its interval."""
    return estimate(report["refinement_gain"], report["refinement_gain_interval_95"], "+.3f")


def draw(report: dict[str, Any], metrics: Sequence[dict[str, float]]) -> Any:
    """Returns a figure: loss parts, coverage and accuracies over training, acceptance by position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    steps = [line["step"] for line in metrics]
    aligned = [name for name in metrics[0] if name.startswith("align_")] if metrics else []
    panels = (
        (axes[0, 0], "loss parts", ["ce", "refined_ce", "l1", "refined_l1"]),
        (axes[0, 1], "coverage and accuracy", ["coverage", "candidate_mass", "accuracy", "refined_accuracy"]),
        (axes[1, 0], "layer alignment and its gate", [*aligned, "lambda"]),
    )
    for axis, title, names in panels:
        for name in names:
            axis.plot(steps, [line.get(name) for line in metrics], label=name)
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
        if steps:
            axis.legend()
    axis = axes[1, 1]
    for name, entry in report["variants"].items():
        shares = entry["acceptance_by_position"]
        axis.plot(range(1, len(shares) + 1), shares, "o-", label=f"{name}: τ = {number(entry['tau'])}")
    axis.set(title="share of rounds accepted up to position", xlabel="position in the block", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend()
    title = f"{report['prompts']} prompts"
    if "refinement_gain" in report:
        temperature = report["variants"]["refined"]["temperature"]
        title += f"; refinement adds {gain_text(report)} to τ at temperature {temperature:g}"
    figure.suptitle(title)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(Command(ReportOptions, make_report), argv, module="specforge_dspine.report", doc=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
