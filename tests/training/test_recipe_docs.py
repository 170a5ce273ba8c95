"""docs/recipes.md names every key of a recipe with its default, and every key that is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from specforge.config import Config

from specforge_dspine.modeling.settings import DSpineOptions
from specforge_dspine.training.recipe import (
    NOT_READ,
    HeldoutOptions,
    ManagedServerOptions,
    StreamOptions,
)
from tests.support import ROOT

TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SPECFORGE = {
    name: Config.model_fields[name].annotation for name in ("model", "data", "training", "tracking", "runtime")
}
OURS = {"dspine": DSpineOptions, "stream": StreamOptions, "heldout": HeldoutOptions}
# What a recipe gets where SpecForge's own default is of another algorithm, or its two sources exclude each other.
OTHER_DEFAULTS = {
    "training.strategy": "`dspine`",
    "data.prompts_path": "required",
    "data.hidden_states_path": "required",
}


def documented(section: str) -> dict[str, str]:
    """Keys and defaults of the tables below a heading."""
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert body, section
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+?) \|", body[1], re.M)
    return {key: default for keys, default in rows for key in re.findall(r"\w+", keys)}


def shown(field: FieldInfo) -> str:
    """A default as the page writes it."""
    value = field.get_default(call_default_factory=True) if not field.is_required() else None
    if field.is_required():
        return "required"
    words: dict[Any, str] = {True: "on", False: "off", 1 / 6: "1/6", 1 / 3: "1/3", 1e-4: "1e-4", (): "[]"}
    if value is None:
        return "`null`"
    if isinstance(value, bool | tuple) or value in (1 / 6, 1 / 3, 1e-4):
        return f"`{words[value]}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def fields(*models: type[BaseModel]) -> dict[str, FieldInfo]:
    return {name: field for model in models for name, field in model.model_fields.items()}


@pytest.mark.parametrize("section", [*OURS, *SPECFORGE])
def test_every_key_is_documented_with_its_default(section: str) -> None:
    models = {"stream": (StreamOptions, ManagedServerOptions)}.get(section, ((OURS | SPECFORGE)[section],))
    read = {name: field for name, field in fields(*models).items() if name not in NOT_READ.get(section, {})}
    expected = {name: OTHER_DEFAULTS.get(f"{section}.{name}", shown(field)) for name, field in read.items()}
    assert documented(section) == expected


def test_the_names_of_a_run_are_documented() -> None:
    keys = ("run_id", "output_dir")
    assert documented("run_id, output_dir") == {key: shown(Config.model_fields[key]) for key in keys}


def test_every_refused_key_is_documented() -> None:
    refused = TEXT[TEXT.index("## Keys of SpecForge that are refused") :]
    keys = [f"{section}.{key}".strip(".") for section, keys in NOT_READ.items() for key in keys]
    keys = [*(key for key in keys if not key.startswith("model.sglang_")), "model.sglang_*"]
    missing = [key for key in keys if f"`{key}`" not in refused]
    assert not missing
