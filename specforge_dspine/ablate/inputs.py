"""Inputs of an ablation: what all its runs depend on, and what must not change when it is continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.evaluation.benchmarks import EvaluationSet
from specforge_dspine.evaluation.provenance import version_facts
from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.resume_contract import data_identity
from specforge_dspine.utils.files import differences, model_fingerprint, read_json, write_json

INPUTS = "inputs.json"
NOT_INPUTS = {  # keys of a recipe that differ from run to run or only name a place
    "": ("run_id", "output_dir"),
    "training": ("seed",),
    "data": ("hidden_states_path", "prompts_path", "cache_dir"),
    "model": ("target_model_path",),
}


def ablation_inputs(
    recipe: Recipe, sections: dict[str, dict[str, Any]], sets: Sequence[EvaluationSet], max_new_tokens: int
) -> dict[str, Any]:
    """What all runs depend on: data, target and sets by content, and the ``dspine`` section of each variant."""
    document = recipe.resolved()
    del document["dspine"]
    for section, keys in NOT_INPUTS.items():
        values = document[section] if section else document
        for key in keys:
            values.pop(key, None)
    return {
        "recipe": document,
        "variants": sections,
        "data": data_identity(recipe.data_path),
        "target": model_fingerprint(Path(recipe.target_path)),
        "sets": {each.name: {"prompts": len(each.prompts), "sha256": each.sha256()} for each in sets},
        "max_new_tokens": max_new_tokens,
        "versions": version_facts("torch", "transformers", "specforge"),
    }


def check_distinct(sections: dict[str, dict[str, Any]]) -> None:
    """Refuse two variants that are the same training, for example because the recipe itself is a variant."""
    seen: dict[str, str] = {}
    for name, section in sections.items():
        other = seen.setdefault(json.dumps(section, sort_keys=True), name)
        if other != name:
            raise ValueError(
                f"variants {other} and {name} are the same training with this recipe; leave one of them out of "
                "--variants, or give a recipe with the full method"
            )


def claim_folder(out: Path, inputs: dict[str, Any]) -> None:
    """Record the inputs of a new ablation in ``out``, or add new variants to an existing one of the same inputs."""
    path = out / INPUTS
    if path.exists():
        before = read_json(path)
        known = before["variants"]
        common = [name for name in known if name in inputs["variants"]]
        now, then = (
            each | {"variants": {name: each["variants"][name] for name in common}} for each in (inputs, before)
        )
        if changes := [f"{name} was {was} and is {value}" for name, was, value in differences(then, now)]:
            raise ValueError(
                f"{out} holds an ablation of other inputs ({'; '.join(changes)}); restore them, or use a new --out"
            )
        inputs = inputs | {"variants": known | inputs["variants"]}
    write_json(path, inputs)
