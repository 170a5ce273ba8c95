"""The variants of a recipe that an ablation compares, and the inputs that all of them share.

Each has overrides of the recipe's ``dspine:`` section.

    table 2   full             the recipe as it is
              no-refinement    with injection; the last write is neither repeated with the chosen token nor trained
              no-injection     block-causal, with layer alignment; without injection there is nothing to refine
              dflash           bidirectional blocks trained by cross-entropy alone
    table 3   dflash-none      the same bidirectional backbone, trained by the recipe's distillation
              dflash-ce        ... and every layer classifies the token
              dflash-cosine    ... and every layer is aligned with the token's code

A custom variant is ``NAME:key=value,key=value``, such as ``narrow:dspine.message_size=32``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specforge_dspine.evaluation.benchmarks import EvaluationSet
from specforge_dspine.evaluation.provenance import version_facts
from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.resume_contract import data_identity
from specforge_dspine.utils.files import differences, model_fingerprint, read_json, write_json

WITHOUT_INJECTION = ("dspine.injection=off", "dspine.refinement=off", "dspine.curriculum=off")
PLAIN = ("dspine.causal=off", *WITHOUT_INJECTION)  # DFlash's backbone
VARIANTS: dict[str, tuple[str, ...]] = {
    "full": (),
    "no-refinement": ("dspine.refinement=off",),
    "no-injection": WITHOUT_INJECTION,
    "dflash": (*PLAIN, "dspine.alignment=off", "dspine.ce_weight=1.0"),
    "dflash-none": (*PLAIN, "dspine.alignment=off"),
    "dflash-ce": (*PLAIN, "dspine.alignment=ce"),
    "dflash-cosine": (*PLAIN, "dspine.alignment=cosine"),
}
"""Overrides of the recipe, by the variant's name."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of folders
BETWEEN = r",(?=[\w.]+=)"  # two overrides, not the entries of a list
INPUTS = "inputs.json"
NOT_INPUTS = {  # keys of a recipe that differ from run to run or only name a place
    "": ("run_id", "output_dir"),
    "training": ("seed",),
    "data": ("hidden_states_path", "prompts_path", "cache_dir"),
    "model": ("target_model_path",),
}


def parse_variants(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The named variants, as in ``VARIANTS``; a ValueError names the one that is unknown, invalid or repeated."""
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, colon, overrides = word.partition(":")
        if not colon and name not in VARIANTS:
            raise ValueError(f"variant {word!r} is unknown: use {', '.join(VARIANTS)}, or NAME:key=value,key=value")
        if colon and (name in VARIANTS or not NAME.fullmatch(name) or not overrides):
            raise ValueError(
                f"variant {word!r}: NAME:key=value,key=value needs a new name (letters, digits and .-_) and overrides"
            )
        others = [each for each in re.split(BETWEEN, overrides) if colon and not each.startswith("dspine.")]
        if others:
            raise ValueError(
                f"variant {word!r}: {', '.join(others)} is not in the dspine section; data, target, seeds and "
                "budget come from the recipe and are the same for all variants"
            )
        if name in found:
            raise ValueError(f"variant {name!r} occurs twice")
        found[name] = tuple(re.split(BETWEEN, overrides)) if colon else VARIANTS[name]
    return found


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
