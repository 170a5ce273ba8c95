"""The README's commands exist: modules, make targets, recipes and files it names."""

from __future__ import annotations

import importlib.util
import re

from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_named_modules_recipes_and_targets_exist() -> None:
    modules = set(re.findall(r"(?:python -m|-m) ((?:specforge_dspine|data_prep)[.\w]*)", README))
    assert len(modules) >= 8
    assert all(importlib.util.find_spec(module) for module in modules)
    for path in re.findall(r"(?:recipes|docs|tests/golden)/[\w./-]+\.(?:yaml|md|safetensors)", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target
