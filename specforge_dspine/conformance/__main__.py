"""A conformance check: the functions that training and decoding call, against a vector file.

    python -m specforge_dspine.conformance FILE.safetensors [--dtype float64|float32|bfloat16] [--device cpu|cuda]

A vector file (format: docs/vectors.md) holds a tiny draft, a target's tables, one sequence and, in float64,
everything that follows from them. Each quantity is printed with max|a − b| / max|b| (discrete ones: the share
that differs; bfloat16 gradients: ‖a − b‖ / min(‖a‖, ‖b‖)) and its tolerance. The exit status is 1 if any is beyond
it, 2 if the file cannot be used. The draft is exported and read back first; the file's blocks run in one padded
batch beside a second, unsupervised sequence, and the objective runs one block per chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from specforge_dspine.conformance.checks import conformance
from specforge_dspine.utils.cli import Command, ExistingPath, Options, option, run_command
from specforge_dspine.utils.errors import RunError


class ConformanceOptions(Options):
    """Options of the conformance check."""

    file: ExistingPath = option("vector file (.safetensors, with a .json of scalars beside it)", positional=True)
    dtype: Literal["float64", "float32", "bfloat16"] = option("of the computation", default="float64")
    device: Literal["cpu", "cuda"] = option("of the computation", default="cpu")


def check_file(options: ConformanceOptions) -> str:
    """Check a vector file; returns a line for every quantity. A RunError names those that do not agree."""
    results = conformance(options.file, getattr(torch, options.dtype), options.device)
    wrong = [check.name for check in results if not check.ok]
    lines = [
        f"{'ok ' if check.ok else 'MISMATCH'}  {check.error:9.2e} (allowed {check.tolerance:.0e})  {check.name}"
        for check in results
    ]
    summary = f"{len(results) - len(wrong)} of {len(results)} quantities agree"
    text = "\n".join([*lines, f"{options.file.name} in {options.dtype}: {summary}"])
    if wrong:
        print(text)
        raise RunError(f"mismatch: {', '.join(wrong)}")
    return text


main = partial(
    run_command, Command(ConformanceOptions, check_file), module="specforge_dspine.conformance", doc=__doc__
)

if __name__ == "__main__":
    raise SystemExit(main())
