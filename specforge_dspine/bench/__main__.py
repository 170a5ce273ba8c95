"""A benchmark of DSpine's training cost, as ratios to SpecForge's own steps: one table, one JSON file.

    python -m specforge_dspine.bench [--device cpu|cuda] [--size small|qwen3_8b] [--dry-run] [--out FILE.json]

Measures steps, the time of their pieces, the objective's peak memory with and without chunks, and rounds of decoding;
at SmolLM2-135M's sizes on a CPU, at Qwen3-8B's on a GPU. Nothing is downloaded. A section that fails or finds no time
left is reported as such, and the next one runs; the file is rewritten after each. Goals are notes: the exit status is
1 only if a section failed or a check found a mismatch.

On a GPU (`--device cuda --size qwen3_8b`) torch, triton, transformers, safetensors and pydantic are needed, and
SpecForge's own modules without what it requires: `pip install --no-deps specforge==0.2.0`. There the conformance
check runs on the GPU too. `--dry-run` walks through all of that at toy size on a CPU.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from specforge_dspine.bench.checks import attention_section, conformance_section, shapes_section
from specforge_dspine.bench.decode_timing import decoding_section
from specforge_dspine.bench.models import SIZES, Bench
from specforge_dspine.bench.section import Plan, Section
from specforge_dspine.bench.step_timing import memory_section, steps_section, time_section, transfer_section
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.machine import machine

ROUNDS = {"cpu": (2, 15), "cuda": (3, 10), "dry": (1, 2)}  # warm-up, measured
# Gradients stay on throughout, so that FlexAttention is compiled once.
SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "shapes": shapes_section,
    "conformance": conformance_section,
    "transfer space": transfer_section,
    "steps": steps_section,
    "time": time_section,
    "memory": memory_section,
    "attention": attention_section,
    "decoding": decoding_section,
}
GPU_SECTIONS = frozenset({"conformance", "attention"})  # on a GPU, and in dry runs


class BenchOptions(Options):
    """Options of the benchmark."""

    device: Literal["cpu", "cuda"] = option("where to measure", default="cpu")
    size: Literal["small", "qwen3_8b"] = option("of the models", default="small")
    dry_run: bool = option("every section at toy size, on the CPU", default=False)
    budget_s: float = option("seconds after which no section starts", default=240.0, ge=0)
    out: Path = option("JSON file of the report", default=Path("runs/bench.json"))


def run_section(name: str, plan: Plan) -> tuple[str, Section]:
    """Run a section; returns its status and content."""
    if plan.left() <= 0:
        return "not run: out of time", Section()
    try:
        section = SECTIONS[name](plan)
    except Exception as error:  # whatever it is, the others still run
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}".splitlines()[0], Section(failed=True)
    return "MISMATCH" if section.failed else "ok", section


def table(report: dict[str, Any]) -> str:
    """The report as aligned text."""
    facts, sizes = report["machine"], report["sizes"]
    device = facts.get("gpu", f"{facts['cpu']}, {facts['threads']} threads")
    lines = [
        f"DSpine benchmark, {report['size']} sizes on {device}, torch {facts['torch']}, "
        f"load {facts['load_before']:.1f}"
        + (" (dry run: the seconds mean nothing)" if report["size"] == "toy" else ""),
        f"S={sizes['sequence']} N={sizes['anchors']} B={sizes['block']} L={sizes['layers']} T={sizes['taps']} "
        f"H={sizes['hidden']} V={sizes['vocab']} r={sizes['rank']} a={sizes['message']} K={sizes['top_k']}, "
        f"{sizes['chunk_blocks'] or 'all'} blocks of logits at a time, {sizes['dtype']}, {report['attention']}",
    ]
    entries = report["sections"].values()
    width = max((len(line["quantity"]) for entry in entries for line in entry["lines"]), default=0)
    for name, entry in report["sections"].items():
        lines.append(f"\n{name}: {entry['status']} ({entry['seconds']:.1f} s)")
        for line in entry["lines"]:
            value = f"{line['value']:,}" if isinstance(line["value"], int) else f"{line['value']:.4g}"
            lines.append(f"  {line['quantity']:<{width}}  {value:>14} {line['unit']:<4} {line['note']}".rstrip())
        lines.extend(f"  {key}: {text}" for key, text in entry["raw"].items() if isinstance(text, str))
    return "\n".join(lines)


def bench(options: BenchOptions) -> str:
    """Run every section within the budget, and rewrite ``--out`` after each; returns the table."""
    if options.device == "cuda" and not options.dry_run and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; --dry-run walks through it on a CPU")
    started = time.monotonic()
    device = torch.device("cpu" if options.dry_run else options.device)
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    size = "toy" if options.dry_run else options.size
    warmup, rounds = ROUNDS["dry" if options.dry_run else device.type]
    plan = Plan(Bench(SIZES[size], device, attention), warmup, rounds, started, options.budget_s)
    report: dict[str, Any] = {
        "size": size,
        "attention": attention,
        "sizes": asdict(SIZES[size]) | {"dtype": str(SIZES[size].dtype).removeprefix("torch.")},
        "machine": machine(device),
        "goals": {},
        "sections": {},
    }
    failed = []
    for name in SECTIONS:
        if name in GPU_SECTIONS and device.type != "cuda" and not options.dry_run:
            continue
        start = time.monotonic()
        status, section = run_section(name, plan)
        failed += [name] if section.failed else []
        report["sections"][name] = {
            "status": status,
            "seconds": time.monotonic() - start,
            "lines": section.lines,
            "raw": section.raw,
        }
        report["goals"] |= section.goals
        report["machine"]["load_after"] = os.getloadavg()[0]
        write_json(options.out, report)
        print(f"{name}: {status}", file=sys.stderr, flush=True)
    text = f"{table(report)}\nwritten: {options.out}"
    if failed:
        print(text)
        raise RunError(f"sections failed: {', '.join(failed)}")
    return text


main = partial(run_command, Command(BenchOptions, bench), module="specforge_dspine.bench", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
