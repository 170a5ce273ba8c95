"""Evaluations side by side: one report.json and a picture.

    python -m specforge_dspine.report --evaluations refined=DIR unrefined=DIR .. --out DIR [--run DIR]

Each folder is what ``specforge_dspine.evaluate`` wrote at one temperature; its name is how the report calls it. With
"refined" and "unrefined" among them, both of one draft on the same prompts, the report says what the refinement adds
to τ; every draw of its interval takes the same prompts of both. Every round's tokens go into report.json, so that all
figures can be recomputed from it (fields: docs/metrics.md); ``--run`` adds the training run's curves to the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import tau_interval
from specforge_dspine.evaluation.metrics import summary
from specforge_dspine.evaluation.results import RESULT, ROUNDS, interval, number, traces_of
from specforge_dspine.utils.figures import figure_axes
from specforge_dspine.utils.files import atomic_write, read_json, read_jsonl


def read_evaluation(folder: Path) -> tuple[dict[str, Any], dict[str, list[Trace]]]:
    """Result and rounds, by set, of a finished evaluation.

    Raises:
        ValueError: it is none, was not finished, or holds several temperatures.
    """
    if not (folder / RESULT).is_file():
        raise ValueError(f"{folder} holds no {RESULT}: is the evaluation finished? Its command continues it")
    result = read_json(folder / RESULT)
    temperatures = result["decoding"]["temperatures"]
    if len(temperatures) != 1:
        raise ValueError(f"{folder} holds temperatures {temperatures}; evaluate each into a folder of its own")
    return result, traces_of(read_jsonl(folder / ROUNDS), temperatures[0])


def refinement_gain(refined: Any, unrefined: Any) -> dict[str, Any]:
    """τ(refined) − τ(unrefined) and its interval, of two ``read_evaluation``.

    Raises:
        ValueError: they differ in more than the refinement.
    """
    results, sets = zip(refined, unrefined, strict=True)
    kinds = [
        {
            "draft": result["draft"]["fingerprint"],
            "target": result["target"]["fingerprint"],
            "temperature": result["decoding"]["temperatures"][0],
        }
        for result in results
    ]
    differing = [name for name in kinds[0] if kinds[0][name] != kinds[1][name]]
    if differing:
        raise ValueError(f"refined and unrefined differ in {', '.join(differing)}; only one may have another name")
    both = [summary(each, results[0]["draft"]["block_size"] - 1)["tau"] for each in sets]
    if None in both:
        raise ValueError("refined or unrefined holds no round")
    return {"refinement_gain": both[0] - both[1], "refinement_gain_interval_95": tau_interval(*sets)}


def compare(evaluations: Mapping[str, Path]) -> dict[str, Any]:
    """What report.json holds.

    Raises:
        ValueError: as ``read_evaluation`` and ``refinement_gain``.
    """
    found = {name: read_evaluation(folder) for name, folder in evaluations.items()}
    variants = {
        name: summary(sets, result["draft"]["block_size"] - 1)
        | {"temperature": result["decoding"]["temperatures"][0], "draft": result["draft"]}
        for name, (result, sets) in found.items()
    }
    first, _ = next(iter(found.values()))
    report: dict[str, Any] = {
        "prompts": max(entry["prompts"] for entry in variants.values()),
        "variants": variants,
        "interval": first["interval"],
        "target": first["target"],
        "versions": first["versions"],
        "decoded_live": sum(result["decoded_live"] for result, _ in found.values()),
    }
    if {"refined", "unrefined"} <= found.keys():
        report |= refinement_gain(found["refined"], found["unrefined"])
    traces = {
        name: [trace.to_json() for each in sets.values() for trace in each] for name, (_, sets) in found.items()
    }
    return report | {"traces": traces}


def draw(path: Path, report: dict[str, Any], metrics: Sequence[dict[str, float]]) -> None:
    """The picture: loss parts, coverage and accuracies over training, acceptance by position."""
    steps = [line["step"] for line in metrics]
    aligned = [name for name in metrics[0] if name.startswith("align_")] if metrics else []
    panels = (
        ("loss parts", ["ce", "refined_ce", "l1", "refined_l1"]),
        ("coverage and accuracy", ["coverage", "candidate_mass", "accuracy", "refined_accuracy"]),
        ("layer alignment and its gate", [*aligned, "lambda"]),
    )
    title = f"{report['prompts']} prompts"
    if "refinement_gain" in report:
        title += f"; refinement adds {report['refinement_gain']:+.3f} to τ"
        title += f" {interval(report['refinement_gain_interval_95'])} at temperature "
        title += f"{report['variants']['refined']['temperature']:g}"
    with figure_axes(path, 2, 2, size=(12, 8), title=title) as (*axes, last):
        for axis, (name, parts) in zip(axes, panels, strict=True):
            for part in parts if steps else ():
                axis.plot(steps, [line.get(part) for line in metrics], label=part)
            axis.set(title=name, xlabel="optimizer step")
        for name, entry in report["variants"].items():
            shares = entry["acceptance_by_position"]
            last.plot(range(1, len(shares) + 1), shares, "o-", label=f"{name}: τ = {number(entry['tau'])}")
        last.set(title="share of rounds accepted up to position", xlabel="position in the block", ylim=(0, 1))


def make_report(evaluations: Mapping[str, Path], out: Path, run: Path | None) -> dict[str, Any]:
    """Compare the evaluations and write report.json and report.png into ``out``.

    Raises:
        ValueError: as ``read_evaluation``.
    """
    report = compare(evaluations)
    metrics: list[dict[str, float]] = []
    if run is not None:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = [values for values in map(json.loads, lines) if "loss" in values]  # others: held-out samples
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / "report.json") as file:
        file.write(json.dumps(report).encode())  # on one line: most of it is ids
    draw(out / "report.png", report, metrics)
    return report


def named_folder(text: str) -> tuple[str, Path]:
    """``NAME=DIR``; argparse turns the ValueError into its own message."""
    name, _, folder = text.partition("=")
    if not folder:
        raise ValueError(text)
    return name, Path(folder)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--evaluations", nargs="+", type=named_folder, required=True, metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="training run whose curves to draw")
    args = parser.parse_args(argv)
    try:
        report = make_report(dict(args.evaluations), args.out, args.run)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, entry in report["variants"].items():
        print(
            f"τ {name:<10} {number(entry['tau'])}  {interval(entry['tau_interval_95'])}  {entry['rounds']} rounds, "
            f"{entry['prompts']} prompts, temperature {entry['temperature']:g}"
        )
    if "refinement_gain" in report:
        print(f"refinement   {report['refinement_gain']:+.3f}  {interval(report['refinement_gain_interval_95'])}")
    print(f"written: {args.out}/report.json, {args.out}/report.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
