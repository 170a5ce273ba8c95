"""The report of an ablation: tables, orderings with their intervals, figures.

    python -m specforge_dspine.ablate.report --ablation runs/ablation [--out DIR] [--note TEXT]

Reads what ``specforge_dspine.ablate`` has finished so far, and writes ablation.md, ablation.json (every number, no
tokens) and figures into ``--out`` (default: the ablation's folder). Runs that are not finished are named and left
out. The paper's numbers stand beside ours, labeled as the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specforge_dspine.ablate.figures import LABELS, draw_figures
from specforge_dspine.ablate.markdown import PAPER, PAPER_LABEL, PAPER_SETS, UNDISTURBED, markdown
from specforge_dspine.ablate.runs import SPEED, VariantRun
from specforge_dspine.ablate.statistics import Counts, count, differences, taus, verdict
from specforge_dspine.ablate.variants import INPUTS, VARIANTS
from specforge_dspine.decoding.loop import Trace
from specforge_dspine.evaluation.bootstrap import RESAMPLES
from specforge_dspine.evaluation.results import ROUNDS, acceptance_by_position, traces_of
from specforge_dspine.training.run_logger import METRICS_FILE
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.files import atomic_write, read_json, read_jsonl, write_json
from specforge_dspine.utils.tables import estimate, number

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


class ReportOptions(Options):
    """Options of the report."""

    ablation: Path = option("--out of specforge_dspine.ablate")
    out: Path | None = option("folder of the report; default: the ablation's", default=None)
    note: str = option("first words of the page: what made it, and beside what", default="")


def finished_runs(folder: Path) -> tuple[dict[str, list[VariantRun]], list[str]]:
    """The finished runs of each variant, by seed, and the names of the others."""
    if not (folder / INPUTS).is_file():
        raise ValueError(f"{folder} holds no {INPUTS}: is it the --out of specforge_dspine.ablate?")
    finished: dict[str, list[VariantRun]] = {}
    others = []
    given = read_json(folder / INPUTS)["variants"]
    for variant in [*(name for name in VARIANTS if name in given), *(name for name in given if name not in VARIANTS)]:
        seeds = sorted(int(path.name.removeprefix("seed")) for path in (folder / variant).glob("seed*"))
        for run in (VariantRun(folder, variant, seed) for seed in seeds):
            if run.evaluated:
                finished.setdefault(variant, []).append(run)
            else:
                others.append(str(run))
    return finished, others


def curve(lines: Sequence[dict[str, float]], name: str) -> dict[str, float]:
    """Means of a metric over ``BINS`` equal ranges, by the last step; τ is that of the output which decoding uses."""
    used = f"refined_{name}" if name == "tau" and f"refined_{name}" in lines[0] else name
    parts = np.array_split(np.arange(len(lines)), min(BINS, len(lines)))
    return {str(int(lines[part[-1]]["step"])): float(np.mean([lines[k][used] for k in part])) for part in parts}


def step_seconds(lines: Sequence[dict[str, float]]) -> list[float]:
    """Seconds of optimizer steps, as SpecForge measured them between two logged ones; the first includes start-up."""
    if len(lines) < 2:
        raise ValueError(f"{len(lines)} steps were logged; a report needs two: set training.log_interval lower")
    return [line["perf/optimizer_step_time_s"] for line in lines[1:]]


def variant_entry(runs: Sequence[VariantRun], traces: dict[str, list[list[Trace]]], counts: Counts) -> dict[str, Any]:
    """The report's entry of one variant."""
    proposals = next(len(trace.rounds[0].proposed) for each in traces.values() for trace in each[0] if trace.rounds)
    pooled = [[trace for each in traces.values() for trace in each[seed]] for seed in range(len(runs))]
    logs = [[line for line in read_jsonl(run.run / METRICS_FILE) if "loss" in line] for run in runs]  # no held-out
    seconds = [step_seconds(log) for log in logs]
    tau = taus(counts)
    return {
        "seeds": [run.seed for run in runs],
        "tau": {name: each.to_json() for name, each in tau.items() if name},
        "tau_mean_over_sets": tau[""].to_json(),
        "rounds": int(sum(each[..., 1].sum() for each in counts.values())),
        "acceptance_by_position": [acceptance_by_position(each, proposals) for each in pooled],
        "steps": int(logs[0][-1]["step"]),
        "seconds_per_step": {
            "undisturbed": float(np.quantile(np.concatenate(seconds), UNDISTURBED)),
            "per_seed_median": [float(np.median(each)) for each in seconds],
        },
        "curves": {name: [curve(log, name) for log in logs] for name in LABELS},
    }


def ordering_entry(above: str, below: str, a: dict[int, Counts], b: dict[int, Counts]) -> dict[str, Any]:
    """Whether ``above`` is above ``below``, on the seeds that both have."""
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
        entry["paper"] = {name: round(high - low, 2) for name, high, low in pairs}
    return entry


def gather(folder: Path) -> dict[str, Any]:
    """The content of ablation.json."""
    runs, others = finished_runs(folder)
    if not runs:
        raise ValueError(f"no run of {folder} is finished; the ablation's command continues it")
    entries, counts = {}, {}
    for variant, of_variant in runs.items():
        by_seed = [traces_of(read_jsonl(run.evaluation / ROUNDS), 0.0) for run in of_variant]  # greedy
        traces = {name: [each[name] for each in by_seed] for name in by_seed[0]}
        by_set = {name: count(each) for name, each in traces.items()}
        entries[variant] = variant_entry(of_variant, traces, by_set)
        counts[variant] = {
            run.seed: {name: each[k : k + 1] for name, each in by_set.items()} for k, run in enumerate(of_variant)
        }
    orderings = [(a, b) for a, b in ORDERINGS if a in runs and b in runs and counts[a].keys() & counts[b].keys()]
    speeds = {json.dumps(read_json(run.folder / SPEED)) for of_variant in runs.values() for run in of_variant}
    return {
        "inputs": read_json(folder / INPUTS),
        "not_finished": others,
        "interval": f"bootstrap over prompts and seeds, {RESAMPLES} resamples, paired between variants",
        "machine": [json.loads(each) for each in sorted(speeds)],
        "variants": entries,
        "orderings": [ordering_entry(a, b, counts[a], counts[b]) for a, b in orderings],
        "paper": {"label": PAPER_LABEL, "sets": PAPER_SETS, "tau": {n: PAPER[n] for n in runs if n in PAPER}},
    }


def make_report(options: ReportOptions) -> str:
    """Write the report; returns a summary."""
    out = options.out or options.ablation
    report = {"note": options.note} | gather(options.ablation)
    write_json(out / "ablation.json", report)
    page = markdown(report, draw_figures(report, out))
    with atomic_write(out / "ablation.md") as file:
        file.write(page.encode())
    lines = []
    for name, entry in report["variants"].items():
        mean = entry["tau_mean_over_sets"]
        lines.append(f"τ {name:<16} {estimate(mean['value'], mean['interval_95'])}")
    for entry in report["orderings"]:
        difference = number(entry["difference"]["value"], "+.3f")
        lines.append(f"{entry['above']} > {entry['below']}: {difference}, {entry['verdict']}")
    return "\n".join([*lines, f"written: {out}/ablation.md, {out}/ablation.json"])


main = partial(run_command, Command(ReportOptions, make_report), module="specforge_dspine.ablate.report", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
