"""What rounding does to a curve: the measurement that its tolerances and its seed were chosen by.

    python -m tests.support.curve_noise [--only NAME ..] [--seeds N ..] [--draws 3]

For each curve and seed, runs on features with relative noise of 1e-7 and 1e-6, on other chunk sizes and on two
threads are compared with the plain run: per class of parts the largest residual as first / absolute / drift
(specforge_dspine/curves/compare.py). Two things in the objective jump where rounding decides: the sign of q − p,
which is ℓ1's gradient, and the K-th candidate. A run that meets neither scatters by 1e-6; one that does is marked
"jump". A reference is recorded from a seed without a jump.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from specforge_dspine.curves import runs
from specforge_dspine.curves.compare import TOLERANCES, TRAILING, Curve, residuals, tolerance_of
from specforge_dspine.curves.runs import CURVES, Spec, run_curve, toy_data_in

NOISE = (1e-7, 1e-6)
CHUNKS = (0, 1, 3)
JUMP = 1e-4  # of any part at any step: three times what was seen without a jump


def noisy_toy_data(toy_data: Path, out: Path, size: float, seed: int) -> Path:
    """A copy of ``toy_data`` whose captured states carry relative Gaussian noise."""
    if not out.exists():
        shutil.copytree(toy_data, out)
        generator = torch.Generator().manual_seed(seed)
        for file in sorted((out / "features").iterdir()):
            record = torch.load(file)
            for name in ("hidden_states", "target_last_hidden_states"):
                value = record[name]
                record[name] = value * (1 + size * torch.randn(value.shape, generator=generator))
            torch.save(record, file)
    return out


def largest(reference: Curve, curve: Curve) -> dict[str, tuple[float, float, float]]:
    """Per class of parts: the largest |d| at the first step, at any, and of its means."""
    found: dict[str, tuple[float, float, float]] = {}
    for part, values in reference.parts.items():
        d = residuals(values, curve.parts[part])
        tail = d[-(len(d) // TRAILING) :]
        means = abs(sum(d) / len(d)), abs(sum(tail) / len(tail))
        name = next(pattern.pattern for pattern, allowed in TOLERANCES if allowed is tolerance_of(part))
        before = found.get(name, (0.0, 0.0, 0.0))
        found[name] = (max(before[0], abs(d[0])), max(before[1], *map(abs, d)), max(before[2], *means))
    return found


def show(label: str, found: dict[str, tuple[float, float, float]]) -> None:
    """One line."""
    mark = "jump" if max(b for _, b, _ in found.values()) > JUMP else ""
    sizes = "   ".join(f"{k}: {a:.0e} {b:.0e} {c:.0e}" for k, (a, b, c) in found.items())
    print(f"  {label:<12}{mark:<5}{sizes}", flush=True)


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    """Sums of another order than ``one_thread``'s."""
    original = runs.one_thread

    @contextlib.contextmanager
    def threads() -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    runs.one_thread = threads
    try:
        yield
    finally:
        runs.one_thread = original


def main() -> None:
    """Print the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CURVES), choices=sorted(CURVES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the curve's own")
    parser.add_argument("--draws", type=int, default=3, help="of each noise (default 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        toy_data = toy_data_in(base)
        for name in args.only:
            for seed in args.seeds or [None]:
                own = () if seed is None else (f"training.seed={seed}",)
                spec = Spec(name, (*CURVES[name].overrides, *own))
                reference = run_curve(spec, base, toy_data)
                print(f"{name}, seed {reference.recipe['training']['seed']}", flush=True)
                for size in NOISE:
                    for draw in range(args.draws):
                        other = noisy_toy_data(toy_data, base / f"noise-{size}-{draw}", size, draw)
                        show(f"noise {size:.0e}", largest(reference, run_curve(spec, base, other)))
                for blocks in CHUNKS:
                    chunked = Spec(name, (*spec.overrides, f"training.objective_chunk_blocks={blocks}"))
                    show(f"chunks {blocks}", largest(reference, run_curve(chunked, base, toy_data)))
                with two_threads():
                    show("2 threads", largest(reference, run_curve(spec, base, toy_data)))


if __name__ == "__main__":
    main()
