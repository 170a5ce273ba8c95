"""Does this installation compute DSpine? The functions that training and decoding call, against a vector file.

    python -m specforge_dspine.conformance FILE.safetensors [--dtype float64|float32|bfloat16] [--device cpu|cuda]

A vector file (format: docs/vectors.md) holds a tiny draft, a target's tables, one sequence and, in float64,
everything that follows from them. Each quantity is printed with max|a − b| / max|b| (discrete ones: the share
that differs; bfloat16 gradients: ‖a − b‖ / min(‖a‖, ‖b‖)) and its tolerance; the exit status is 1 if any is off,
2 if the file cannot be used. The draft is exported and read back first; the file's blocks run in one padded batch
beside a second, unsupervised sequence, and the objective runs one block per chunk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.conformance.checks import conformance


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(prog="python -m specforge_dspine.conformance", description=__doc__)
    parser.add_argument("file", type=Path, help="vector file (.safetensors, with a .json of scalars beside it)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args: Any = parser.parse_args(argv)
    try:
        results = conformance(args.file, getattr(torch, args.dtype), args.device)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for check in results:
        print(f"{'ok ' if check.ok else 'OFF'}  {check.error:9.2e} (allowed {check.tolerance:.0e})  {check.name}")
    off = [check.name for check in results if not check.ok]
    print(f"{args.file.name} in {args.dtype}: {len(results) - len(off)} of {len(results)} quantities agree")
    if off:
        print("off: " + ", ".join(off), file=sys.stderr)
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
