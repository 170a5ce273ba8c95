"""Training curves as a net: small deterministic runs of the real trainer, recorded once and compared ever after.

    python -m specforge_dspine.curves record|check|plot [--only NAME ..] [--dir tests/curves] [--out DIR]

Each curve trains a small draft on the world of ``curve_world``, from offline features, past the end of the warm-up
and of the curriculum. ``record`` writes references into ``--dir``; ``check`` trains again, compares, names the part
and the step at which a deviation starts, and draws both curves into ``--out``; it also holds the runs that are equal
by construction against each other (``curve_groups``). ``plot`` draws the references. Exit status: 0; 1 where
something deviates; 2 where something is missing or cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specforge_dspine.curves import toy_target as curve_world
from specforge_dspine.curves.compare import TOLERANCES, Curve, Deviation, compare, draw
from specforge_dspine.curves.runs import CURVES, DIGITS, CurvesError, run_curve
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.versions import VERSION


def save_reference(curve: Curve, folder: Path) -> Path:
    """Write ``NAME.json``, one line per part, atomically; returns its path."""
    head = {
        "name": curve.name,
        "recipe": curve.recipe,
        "versions": versions(),
        "seed": curve.recipe["training"]["seed"],
        "world_seed": curve_world.SEED,
        "steps": curve.steps,
        "tolerances": {pattern.pattern: tolerance._asdict() for pattern, tolerance in TOLERANCES},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts = [
        f"    {json.dumps(part)}: {json.dumps([float(f'{value:.{DIGITS}g}') for value in values])}"
        for part, values in curve.parts.items()
    ]
    lines.append('  "parts": {\n' + ",\n".join(parts) + "\n  }")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{curve.name}.json"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def load_reference(name: str, folder: Path) -> Curve:
    """The recorded curve ``name``.

    Raises:
        CurvesError: there is none, or it cannot be read.
    """
    path = folder / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Curve(content["name"], content["recipe"], content["parts"])
    except FileNotFoundError:
        raise CurvesError(
            f"{path}: no reference; record it with python -m specforge_dspine.curves record --only {name}"
        ) from None
    except (ValueError, KeyError) as error:
        raise CurvesError(f"{path} is no reference ({error!r}); record it again, or restore it") from error


def versions() -> dict[str, str]:
    """What produced a curve."""
    return {name: version(name) for name in ("torch", "specforge", "transformers")} | {"specforge_dspine": VERSION}


def changed_options(reference: dict[str, Any], ours: dict[str, Any], path: str = "") -> list[str]:
    """Options of the reference's recipe that are different now: often the cause of a deviation. Options that the
    reference does not know are newer than it."""
    found = []
    for key, before in reference.items():
        now = ours.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            found += changed_options(before, now, f"{path}{key}.")
        elif before != now:
            found.append(f"{path}{key}: recorded with {before!r}, now {now!r}")
    return found


def check_curve(name: str, references: Path, workdir: Path, out: Path) -> list[Deviation]:
    """Train curve ``name`` again, print how it compares, and draw it into ``out`` if it deviates.

    Raises:
        CurvesError: no reference; RecipeError and so on as ``run_curve``.
    """
    reference = load_reference(name, references)
    curve = run_curve(CURVES[name], workdir)
    deviations = compare(reference, curve)
    if not deviations:
        print(f"ok   {name}: {curve.steps} steps, {len(reference.parts)} parts")
        return []
    print(f"OFF  {name}: {len(deviations)} deviations")
    for line in [*map(str, deviations), *changed_options(reference.recipe, curve.recipe)]:
        print(f"       {line}")
    out.mkdir(parents=True, exist_ok=True)
    draw(out / f"{name}.png", reference, curve, deviations)
    print(f"       drawn: {out / name}.png")
    return deviations


def check(names: list[str], references: Path, out: Path, *, groups: bool) -> int:
    """``check`` of the command line; returns the number of curves and groups that are off.

    Raises:
        CurvesError: no reference, or a group's run that failed; RecipeError and so on as ``run_curve``.
    """
    from specforge_dspine.curves.equivalence import GROUPS, check_group

    off = 0
    with tempfile.TemporaryDirectory(prefix="dspine-curves-") as folder:
        for name in names:
            off += bool(check_curve(name, references, Path(folder), out))
        for group in GROUPS.values() if groups else ():
            off += bool(check_group(group, Path(folder)))
    return off


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("record", "check", "plot"))
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(CURVES), help="these curves, no groups")
    parser.add_argument("--dir", type=Path, default=Path("tests/curves"), help="references (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/curves"), help="pictures (default: %(default)s)")
    args = parser.parse_args(argv)
    names = args.only or list(CURVES)
    try:
        if args.action == "check":
            return 1 if check(names, args.dir, args.out, groups=args.only is None) else 0
        with tempfile.TemporaryDirectory(prefix="dspine-curves-") as folder:
            for name in names:
                if args.action == "record":
                    print(f"recorded {save_reference(run_curve(CURVES[name], Path(folder)), args.dir)}")
                else:
                    args.out.mkdir(parents=True, exist_ok=True)
                    draw(args.out / f"{name}.png", load_reference(name, args.dir))
                    print(f"drawn {args.out / name}.png")
    except (CurvesError, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
