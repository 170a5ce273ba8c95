"""The variants of a recipe that ablations compare, each with overrides of the recipe's ``dspine:`` section.

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

import re
from collections.abc import Sequence

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
