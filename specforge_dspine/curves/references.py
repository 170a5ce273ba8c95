"""References: recorded curves as JSON files, one line per part."""

from __future__ import annotations

import json
from pathlib import Path

from specforge_dspine.curves import toy_target
from specforge_dspine.curves.compare import TOLERANCES, Curve
from specforge_dspine.evaluation.provenance import version_facts
from specforge_dspine.utils.errors import InvalidFileError
from specforge_dspine.utils.files import atomic_write, read_json

DIGITS = 8  # significant, of every number: as many as float32 has


def save_reference(curve: Curve, folder: Path) -> Path:
    """Write ``NAME.json``; returns its path."""
    head = {
        "name": curve.name,
        "recipe": curve.recipe,
        "versions": version_facts("torch", "specforge", "transformers"),
        "seed": curve.recipe["training"]["seed"],
        "toy_target_seed": toy_target.SEED,
        "steps": curve.steps,
        "tolerances": {pattern.pattern: tolerance._asdict() for pattern, tolerance in TOLERANCES},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts = [
        f"    {json.dumps(part)}: {json.dumps([float(f'{value:.{DIGITS}g}') for value in values])}"
        for part, values in curve.parts.items()
    ]
    lines.append('  "parts": {\n' + ",\n".join(parts) + "\n  }")
    path = folder / f"{curve.name}.json"
    with atomic_write(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path


def load_reference(name: str, folder: Path) -> Curve:
    """The recorded curve ``name``."""
    try:
        content = read_json(folder / f"{name}.json")
        return Curve(content["name"], content["recipe"], content["parts"])
    except (InvalidFileError, KeyError) as error:
        command = f"python -m specforge_dspine.curves record --only {name}"
        raise InvalidFileError(f"{error}; restore the reference, or record it with {command}") from error
