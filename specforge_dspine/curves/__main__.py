"""Training curves as a regression check: small deterministic runs of the real trainer, recorded once.

    python -m specforge_dspine.curves record|check|plot [--only NAME ..] [--dir tests/curves] [--out DIR]

Each curve trains a small draft on a toy target (toy_target.py), from offline features, past the end of the warm-up
and of the curriculum. ``record`` writes references into ``--dir``. ``check`` trains again, compares, names the part
and the step at which a deviation starts, and draws both curves into ``--out``; it also compares the runs that are
equal by construction (runs.py). ``plot`` draws the references. Exit status: 0; 1 if something deviates or a
run fails; 2 if a reference is missing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from specforge_dspine.curves.compare import compare, draw_curve
from specforge_dspine.curves.runs import CURVES, GROUPS, check_group, load_reference, run_curve, save_reference
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import ABSENT, differences


class CurvesOptions(Options):
    """Options of the curves."""

    action: Literal["record", "check", "plot"] = option("what to do", positional=True)
    only: tuple[str, ...] = option("these curves, no groups", default=(), metavar="NAME")
    dir: Path = option("folder of the references", default=Path("tests/curves"))
    out: Path = option("folder of the figures", default=Path("runs/curves"))


def curves(options: CurvesOptions) -> None:
    """Record, check or plot the curves; a RunError names those that deviate."""
    if unknown := set(options.only) - CURVES.keys():
        raise ValueError(f"--only {' '.join(sorted(unknown))}: the curves are {', '.join(CURVES)}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="dspine-curves-") as folder:
        for name in options.only or CURVES:
            if options.action == "record":
                print(f"recorded {save_reference(run_curve(CURVES[name], Path(folder)), options.dir)}", flush=True)
            elif options.action == "check":
                failed += [] if check_curve(name, options, Path(folder)) else [name]
            else:
                draw_curve(options.out / f"{name}.png", load_reference(name, options.dir))
                print(f"drawn {options.out / name}.png")
        for name, specs in GROUPS.items() if options.action == "check" and not options.only else ():
            members = ", ".join(spec.name for spec in specs)
            failed += [] if print_result(name, members, check_group(name, Path(folder))) else [name]
    if failed:
        raise RunError(f"curves deviate: {', '.join(failed)}")


def check_curve(name: str, options: CurvesOptions, workdir: Path) -> bool:
    """Train curve ``name`` again, print how it compares, and draw it if it deviates; returns whether it agrees."""
    reference = load_reference(name, options.dir)
    curve = run_curve(CURVES[name], workdir)
    deviations = compare(reference, curve)
    changes = [  # often the cause; options that the reference lacks are newer than it
        f"{key}: recorded with {then!r}, now {now!r}"
        for key, then, now in differences(reference.recipe, curve.recipe)
        if then != ABSENT
    ]
    agrees = print_result(name, f"{curve.steps} steps, {len(reference.parts)} parts", [*deviations, *changes])
    if deviations:
        path = options.out / f"{name}.png"
        draw_curve(path, reference, curve, deviations)
        print(f"       drawn: {path}")
    return agrees


def print_result(name: str, details: str, problems: Iterable[object]) -> bool:
    """Print whether a curve or a group agrees, and its ``problems`` if not."""
    lines = [f"       {each}" for each in problems]
    print("\n".join([f"{'MISMATCH' if lines else 'ok  '} {name}: {details}", *lines]), flush=True)
    return not lines


main = partial(run_command, Command(CurvesOptions, curves), module="specforge_dspine.curves", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
