"""The report of an ablation: tables, orderings with their intervals, pictures.

    python -m specforge_dspine.ablate.report --ablation runs/ablation [--out DIR] [--note TEXT]

Reads what ``specforge_dspine.ablate`` has finished so far, and writes ablation.md, ablation.json (every number, no
tokens) and pictures into ``--out`` (default: the ablation's folder). Runs that are not finished are named and left
out. The paper's own numbers stand beside ours and say so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specforge_dspine.ablate.figures import LABELS, draw_all
from specforge_dspine.ablate.markdown import PAPER, PAPER_LABEL, PAPER_SETS, UNDISTURBED, interval, markdown
from specforge_dspine.ablate.runs import INPUTS, SPEED, Place
from specforge_dspine.ablate.statistics import Counts, Tau, count, differences, smoothed, taus, verdict
from specforge_dspine.ablate.variants import VARIANTS
from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import RESAMPLES
from specforge_dspine.evaluation.metrics import acceptance_by_position
from specforge_dspine.evaluation.results import ROUNDS, traces_of
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.files import atomic_write, read_json, read_jsonl, write_json

BINS = 20  # of a curve
ORDERINGS = (
    ("full", "no-refinement"),
    ("no-refinement", "no-injection"),
    ("no-injection", "dflash"),
    ("full", "dflash"),
    ("dflash-cosine", "dflash-none"),
    ("dflash-none", "dflash-ce"),
    ("dflash-cosine", "dflash-ce"),
)


def finished(folder: Path) -> tuple[dict[str, list[Place]], list[str]]:
    """The finished runs of each variant, by seed, and the names of others.

    Raises:
        ValueError: ``folder`` holds no ablation.
    """
    if not (folder / INPUTS).is_file():
        raise ValueError(f"{folder} holds no {INPUTS}: is it the --out of specforge_dspine.ablate?")
    runs: dict[str, list[Place]] = {}
    others = []
    given = read_json(folder / INPUTS)["variants"]
    for variant in [*(name for name in VARIANTS if name in given), *(name for name in given if name not in VARIANTS)]:
        seeds = sorted(int(path.name.removeprefix("seed")) for path in (folder / variant).glob("seed*"))
        for place in (Place(folder, variant, seed) for seed in seeds):
            if place.evaluated:
                runs.setdefault(variant, []).append(place)
            else:
                others.append(str(place))
    return runs, others


def answers(places: Sequence[Place]) -> dict[str, list[list[Trace]]]:
    """The greedy answers of several seeds, by set."""
    found = [traces_of(read_jsonl(place.evaluation / ROUNDS), 0.0) for place in places]
    return {name: [each[name] for each in found] for name in found[0]}


def logged(place: Place) -> list[dict[str, float]]:
    """The logged steps of a run."""
    lines = (place.run / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [values for values in map(json.loads, lines) if "loss" in values]  # others: held-out samples


def curve(lines: Sequence[dict[str, float]], name: str) -> dict[str, float]:
    """A metric over the steps; τ is the one of the output that decoding uses."""
    used = f"refined_{name}" if name == "tau" and f"refined_{name}" in lines[0] else name
    points = smoothed([int(line["step"]) for line in lines], [line[used] for line in lines], BINS)
    return {str(step): value for step, value in points.items()}


def step_seconds(lines: Sequence[dict[str, float]]) -> list[float]:
    """Of optimizer steps, as SpecForge measured them between two logged ones; the first holds the start.

    Raises:
        ValueError: there are no two.
    """
    if len(lines) < 2:
        raise ValueError(f"{len(lines)} steps were logged; a report needs two: set training.log_interval lower")
    return [line["perf/optimizer_step_time_s"] for line in lines[1:]]


def variant_entry(places: Sequence[Place], traces: dict[str, list[list[Trace]]], counts: Counts) -> dict[str, Any]:
    """What the report says of one variant."""
    seeds = range(len(places))
    proposals = next(len(trace.rounds[0].proposed) for each in traces.values() for trace in each[0] if trace.rounds)
    pooled = [[trace for each in traces.values() for trace in each[seed]] for seed in seeds]
    lines = [logged(place) for place in places]
    seconds = [step_seconds(each) for each in lines]
    found = taus(counts)
    return {
        "seeds": [place.seed for place in places],
        "tau": {name: each.to_json() for name, each in found.items() if name},
        "tau_mean_over_sets": found[""].to_json(),
        "rounds": int(sum(each[..., 1].sum() for each in counts.values())),
        "acceptance_by_position": [acceptance_by_position(each, proposals) for each in pooled],
        "steps": int(lines[0][-1]["step"]),
        "seconds_per_step": {
            "undisturbed": float(np.quantile(np.concatenate(seconds), UNDISTURBED)),
            "per_seed_median": [float(np.median(each)) for each in seconds],
        },
        "curves": {name: [curve(each, name) for each in lines] for name in LABELS},
    }


def comparison(above: str, below: str, a: dict[int, Counts], b: dict[int, Counts]) -> dict[str, Any]:
    """Whether ``above`` really is above ``below``, on the seeds that both have."""
    seeds = sorted(a.keys() & b.keys())
    both = [{name: np.concatenate([own[seed][name] for seed in seeds]) for name in own[seeds[0]]} for own in (a, b)]
    found = differences(*both)
    entry: dict[str, Any] = {
        "above": above,
        "below": below,
        "seeds": seeds,
        "difference": found[""].to_json(),
        "by_set": {name: each.to_json() | {"verdict": verdict(each)} for name, each in found.items() if name},
        "verdict": verdict(found[""]),
    }
    if above in PAPER and below in PAPER:
        pairs = zip(PAPER_SETS, PAPER[above], PAPER[below], strict=True)
        entry["paper"] = {name: round(mine - other, 2) for name, mine, other in pairs}
    return entry


def gather(folder: Path) -> dict[str, Any]:
    """What ablation.json holds.

    Raises:
        ValueError: there is no ablation, no finished run in it, or runs that cannot be compared.
    """
    runs, others = finished(folder)
    if not runs:
        raise ValueError(f"no run of {folder} is finished; the ablation's command continues it")
    entries, counts = {}, {}
    for variant, places in runs.items():
        traces = answers(places)
        of_seeds = {name: count(each) for name, each in traces.items()}
        entries[variant] = variant_entry(places, traces, of_seeds)
        counts[variant] = {
            place.seed: {name: each[k : k + 1] for name, each in of_seeds.items()} for k, place in enumerate(places)
        }
    orderings = [(a, b) for a, b in ORDERINGS if a in runs and b in runs and counts[a].keys() & counts[b].keys()]
    speeds = {json.dumps(read_json(place.folder / SPEED)) for places in runs.values() for place in places}
    return {
        "inputs": read_json(folder / INPUTS),
        "not_finished": others,
        "interval": f"bootstrap over prompts and seeds, {RESAMPLES} resamples, paired between variants",
        "machine": [json.loads(each) for each in sorted(speeds)],
        "variants": entries,
        "orderings": [comparison(a, b, counts[a], counts[b]) for a, b in orderings],
        "paper": {"label": PAPER_LABEL, "sets": PAPER_SETS, "tau": {n: PAPER[n] for n in runs if n in PAPER}},
    }


def make_report(folder: Path, out: Path, note: str = "") -> dict[str, Any]:
    """Write the report of the ablation in ``folder`` into ``out``; its first words are the ``note``.

    Raises:
        ValueError: as ``gather``.
    """
    report = {"note": note} | gather(folder)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "ablation.json", report)
    pictures = draw_all(report, out)
    with atomic_write(out / "ablation.md") as file:
        file.write(markdown(report, pictures).encode())
    return report


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.ablate.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ablation", type=Path, required=True, help="--out of specforge_dspine.ablate")
    parser.add_argument("--out", type=Path, help="default: the same folder")
    parser.add_argument("--note", default="", help="first words of the page: what made it, and beside what")
    args = parser.parse_args(argv)
    out = args.out or args.ablation
    try:
        report = make_report(args.ablation, out, args.note)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, entry in report["variants"].items():
        mean = entry["tau_mean_over_sets"]
        print(f"τ {name:<16} {mean['value']:.3f}  [{interval(mean['interval_95'])}]")
    for entry in report["orderings"]:
        found = Tau(*entry["difference"].values())
        print(f"{entry['above']} > {entry['below']}: {found.value:+.3f}, {entry['verdict']}")
    print(f"written: {out}/ablation.md, {out}/ablation.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
