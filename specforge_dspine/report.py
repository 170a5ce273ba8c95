"""Compare evaluations: one report.json and a picture.

    python -m specforge_dspine.report --evaluations refined=DIR unrefined=DIR .. --out DIR [--run DIR]

Each folder is what specforge_dspine.evaluate wrote at one temperature; its name is used in the report. With "refined"
and "unrefined" among them, both of one draft on the same prompts, the report gives what the refinement adds to τ.
report.json holds every round's tokens, so that all figures can be recomputed from it (fields: docs/metrics.md).
--run adds the training run's curves to the picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import field_validator

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.results import RESULT, ROUNDS, summary, tau_difference, traces_of
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.figures import figure_axes
from specforge_dspine.utils.files import atomic_write, read_json, read_jsonl
from specforge_dspine.utils.tables import estimate, markdown_table, number

Evaluation = tuple[dict[str, Any], dict[str, list[Trace]]]
"""A result, and its responses by set."""

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
    words = [word.partition("=") for word in options.evaluations]
    report = compare({name: Path(folder) for name, _, folder in words})
    metrics: list[dict[str, float]] = []
    if options.run is not None:  # lines without a loss are of held-out samples
        metrics = [line for line in read_jsonl(options.run / "metrics.jsonl") if "loss" in line]
    with atomic_write(options.out / "report.json") as file:
        file.write(json.dumps(report).encode())  # on one line: most of it is ids
    draw(options.out / "report.png", report, metrics)
    lines = [
        (name, f"{entry['temperature']:g}", figure, entry["rounds"], entry["prompts"])
        for name, entry in report["variants"].items()
        for figure in [estimate(entry["tau"], entry["tau_interval_95"])]
    ]
    text = markdown_table(COLUMNS, lines)
    if "refinement_gain" in report:
        text.append(f"\nThe refinement adds {gain_text(report)} to τ.")
    return "\n".join([*text, f"wrote {options.out / 'report.json'} and {options.out / 'report.png'}"])


def read_evaluation(folder: Path) -> Evaluation:
    """Read a finished evaluation at one temperature.

    Raises:
        ValueError: it is not finished, or holds several temperatures.
    """
    if not (folder / RESULT).is_file():
        raise ValueError(f"{folder} holds no {RESULT}: is the evaluation finished? Its command continues it")
    result = read_json(folder / RESULT)
    temperatures = result["decoding"]["temperature"]
    if len(temperatures) != 1:
        raise ValueError(f"{folder} holds temperatures {temperatures}; evaluate each into a folder of its own")
    return result, traces_of(read_jsonl(folder / ROUNDS), temperatures[0])


def refinement_gain(refined: Evaluation, unrefined: Evaluation) -> dict[str, Any]:
    """τ(refined) − τ(unrefined) and its interval.

    Raises:
        ValueError: the two differ in more than the refinement, or have no round.
    """
    for part, name in (("draft", "fingerprint"), ("target", "fingerprint"), ("decoding", "temperature")):
        if refined[0][part][name] != unrefined[0][part][name]:
            raise ValueError(f"refined and unrefined differ in {part} {name}; give one of them another name")
    gain, bounds = tau_difference(refined[1], unrefined[1])
    if gain is None:
        raise ValueError("refined and unrefined hold no round")
    return {"refinement_gain": gain, "refinement_gain_interval_95": bounds}


def compare(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Returns what report.json holds of evaluations by name.

    Raises:
        ValueError: as ``read_evaluation`` and ``refinement_gain``.
    """
    evaluations = {name: read_evaluation(folder) for name, folder in folders.items()}
    variants = {
        name: summary(sets, result["draft"]["block_size"] - 1)
        | {"temperature": result["decoding"]["temperature"][0], "draft": result["draft"]}
        for name, (result, sets) in evaluations.items()
    }
    first, _ = next(iter(evaluations.values()))
    report: dict[str, Any] = {
        "prompts": max(entry["prompts"] for entry in variants.values()),
        "variants": variants,
        **{name: first[name] for name in ("interval", "target", "versions")},
        "decoded_live": sum(result["decoded_live"] for result, _ in evaluations.values()),
    }
    if {"refined", "unrefined"} <= evaluations.keys():
        report |= refinement_gain(evaluations["refined"], evaluations["unrefined"])
    traces = {
        name: [asdict(trace) for each in sets.values() for trace in each] for name, (_, sets) in evaluations.items()
    }
    return report | {"traces": traces}


def gain_text(report: dict[str, Any]) -> str:
    """What the refinement adds to τ, with its interval."""
    return estimate(report["refinement_gain"], report["refinement_gain_interval_95"], "+.3f")


def draw(path: Path, report: dict[str, Any], metrics: Sequence[dict[str, float]]) -> None:
    """Draw loss parts, coverage and accuracies over training, and acceptance by position."""
    steps = [line["step"] for line in metrics]
    aligned = [name for name in metrics[0] if name.startswith("align_")] if metrics else []
    panels = (
        ("loss parts", ["ce", "refined_ce", "l1", "refined_l1"]),
        ("coverage and accuracy", ["coverage", "candidate_mass", "accuracy", "refined_accuracy"]),
        ("layer alignment and its gate", [*aligned, "lambda"]),
    )
    title = f"{report['prompts']} prompts"
    if "refinement_gain" in report:
        temperature = report["variants"]["refined"]["temperature"]
        title += f"; refinement adds {gain_text(report)} to τ at temperature {temperature:g}"
    with figure_axes(path, 2, 2, size=(12, 8), title=title) as (*axes, last):
        for axis, (name, parts) in zip(axes, panels, strict=True):
            for part in parts if steps else ():
                axis.plot(steps, [line.get(part) for line in metrics], label=part)
            axis.set(title=name, xlabel="optimizer step")
        for name, entry in report["variants"].items():
            shares = entry["acceptance_by_position"]
            last.plot(range(1, len(shares) + 1), shares, "o-", label=f"{name}: τ = {number(entry['tau'])}")
        last.set(title="share of rounds accepted up to position", xlabel="position in the block", ylim=(0, 1))


main = partial(run_command, Command(ReportOptions, make_report), module="specforge_dspine.report", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
