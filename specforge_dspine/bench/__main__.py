"""What DSpine's training costs, as ratios to SpecForge's own steps: one table, one JSON file.

    python -m specforge_dspine.bench [--device cpu|cuda] [--size small|qwen3_8b] [--dry-run] [--out FILE.json]

Steps, where their time goes, the objective's peak memory with and without chunks, and rounds of decoding; at
SmolLM2-135M's sizes on a CPU, at Qwen3-8B's on a GPU. Nothing is downloaded. A section that fails, or finds the
budget used up, says so and the next one runs; the file is rewritten after each. Goals are notes: the exit status is 1
only where a section failed or a check is off.

On a GPU (`--device cuda --size qwen3_8b`) torch, triton, transformers, safetensors and pydantic are needed, and
SpecForge's own modules without what it requires: `pip install --no-deps specforge==0.2.0`. There the conformance
check runs on the card too. `--dry-run` walks through all of that at toy size on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.bench.models import SIZES, Bench, Sizes
from specforge_dspine.bench.sections import CARD_SECTIONS, GOALS, SECTIONS, Plan, Row, Section
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.machine import machine

ROUNDS = {"cpu": (2, 15), "cuda": (3, 10), "dry": (1, 2)}  # warm-up, measured


def run_section(name: str, plan: Plan) -> tuple[str, Section]:
    """The section's status and what it found."""
    if plan.left() <= 0:
        return "not run: out of time", Section()
    try:
        section = SECTIONS[name](plan)
    except Exception as error:  # whatever it is, the others still run
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}".splitlines()[0], Section(failed=True)
    return "off" if section.failed else "ok", section


def table(report: dict[str, Any]) -> str:
    """The report as aligned text."""
    facts, sizes = report["machine"], report["sizes"]
    chip = facts.get("gpu", f"{facts['cpu']}, {facts['threads']} threads")
    lines = [
        f"DSpine benchmark, {report['size']} sizes on {chip}, torch {facts['torch']}, load {facts['load_before']:.1f}"
        + (" (dry run: the seconds mean nothing)" if report["size"] == "toy" else ""),
        f"S={sizes['sequence']} N={sizes['anchors']} B={sizes['block']} L={sizes['layers']} T={sizes['taps']} "
        f"H={sizes['hidden']} V={sizes['vocab']} r={sizes['rank']} a={sizes['message']} K={sizes['top_k']}, "
        f"{sizes['chunk_blocks'] or 'all'} blocks of logits at a time, {sizes['dtype']}, {report['attention']}",
    ]
    entries = report["sections"].values()
    width = max((len(row["quantity"]) for entry in entries for row in entry["rows"]), default=0)
    for name, entry in report["sections"].items():
        lines.append(f"\n{name}: {entry['status']} ({entry['seconds']:.1f} s)")
        for row in entry["rows"]:
            value = f"{row['value']:,}" if isinstance(row["value"], int) else f"{row['value']:.4g}"
            lines.append(f"  {row['quantity']:<{width}}  {value:>14} {row['unit']:<4} {row['note']}".rstrip())
        lines.extend(f"  {key}: {text}" for key, text in entry["raw"].items() if isinstance(text, str))
    return "\n".join(lines)


def goals(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """The measured goals: value, limit, and whether it is met."""
    return {
        row.quantity: {"value": row.value, "limit": GOALS[row.quantity], "met": row.value <= GOALS[row.quantity]}
        for row in rows
        if row.quantity in GOALS
    }


def measure(
    size: str, device: torch.device, attention: str, *, dry: bool, budget_s: float, out: Path
) -> dict[str, Any]:
    """Run every section within the budget; the report, which ``out`` holds after each section."""
    started = time.monotonic()
    sizes: Sizes = SIZES[size]
    bench = Bench(sizes, device, attention)
    warmup, rounds = ROUNDS["dry" if dry else device.type]
    plan = Plan(bench, warmup, rounds, started, budget_s)
    report: dict[str, Any] = {
        "size": size,
        "attention": attention,
        "sizes": asdict(sizes) | {"dtype": str(sizes.dtype).removeprefix("torch.")},
        "machine": machine(device),
        "goals": {},
        "sections": {},
    }
    for name in SECTIONS:
        if name in CARD_SECTIONS and device.type != "cuda" and not dry:
            continue
        start = time.monotonic()
        status, section = run_section(name, plan)
        report["sections"][name] = {
            "status": status,
            "seconds": time.monotonic() - start,
            "rows": [asdict(row) for row in section.rows],
            "raw": section.raw,
        }
        report["goals"] |= goals(section.rows)
        report["machine"]["load_after"] = os.getloadavg()[0]
        write_json(out, report)
        print(f"{name}: {status}", file=sys.stderr, flush=True)
    return report


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("small", "qwen3_8b"), default="small")
    parser.add_argument("--dry-run", action="store_true", help="every section at toy size, on the CPU")
    parser.add_argument("--budget-s", type=float, default=240, help="no section starts after this (default 240)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"), help="default runs/bench.json")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not args.dry_run and not torch.cuda.is_available():
        print("error: --device cuda: torch sees no GPU here; --dry-run walks through it on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.dry_run else args.device)
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    size = "toy" if args.dry_run else args.size
    report = measure(size, device, attention, dry=args.dry_run, budget_s=args.budget_s, out=args.out)
    print(table(report))
    print(f"written: {args.out}")
    statuses = [entry["status"] for entry in report["sections"].values()]
    return 1 if any(status == "off" or status.startswith("failed") for status in statuses) else 0


if __name__ == "__main__":
    raise SystemExit(main())
