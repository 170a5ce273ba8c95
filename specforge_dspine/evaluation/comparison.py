"""Finished evaluations side by side: what report.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.metrics import summary, tau_difference
from specforge_dspine.evaluation.results import RESULT, ROUNDS, traces_of
from specforge_dspine.utils.files import read_json, read_jsonl

Evaluation = tuple[dict[str, Any], dict[str, list[Trace]]]
"""A result, and its responses by set."""


def read_evaluation(folder: Path) -> Evaluation:
    """Read a finished evaluation at one temperature.

    Raises:
        ValueError: it is not finished, or holds several temperatures.
    """
    if not (folder / RESULT).is_file():
        raise ValueError(f"{folder} holds no {RESULT}: is the evaluation finished? Its command continues it")
    result = read_json(folder / RESULT)
    temperatures = result["decoding"]["temperatures"]
    if len(temperatures) != 1:
        raise ValueError(f"{folder} holds temperatures {temperatures}; evaluate each into a folder of its own")
    return result, traces_of(read_jsonl(folder / ROUNDS), temperatures[0])


def refinement_gain(refined: Evaluation, unrefined: Evaluation) -> dict[str, Any]:
    """τ(refined) − τ(unrefined) and its interval.

    Raises:
        ValueError: the two differ in more than the refinement, or have no round.
    """
    identities = [
        {
            "draft": result["draft"]["fingerprint"],
            "target": result["target"]["fingerprint"],
            "temperature": result["decoding"]["temperatures"][0],
        }
        for result, _ in (refined, unrefined)
    ]
    differing = [name for name, value in identities[0].items() if value != identities[1][name]]
    if differing:
        raise ValueError(f"refined and unrefined differ in {', '.join(differing)}; give one of them another name")
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
        | {"temperature": result["decoding"]["temperatures"][0], "draft": result["draft"]}
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
