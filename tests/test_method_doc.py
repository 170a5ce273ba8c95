"""docs/method.md holds every section that code cites, and the modules of the method that it names exist."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
HEADINGS = set(re.findall(r"^#+ §([\d.]+) ", PAGE, re.M))
# "§6.2", or a range such as "§2–§4" and "§2–4"
CITED = re.compile(r"§(\d+(?:\.\d+)?)(?:–§?(\d+(?:\.\d+)?))?")


@pytest.mark.parametrize("package", ["specforge_dspine", "data_prep"])
def test_every_section_that_code_cites_is_there(package: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}: §{section}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for sections in CITED.findall(path.read_text(encoding="utf-8"))
        for section in sections
        if section and section not in HEADINGS
    ]
    assert not missing
    assert {"1", "2", "3", "4", "5", "6", "6.2", "6.4", "8"} <= HEADINGS


def test_modules_of_the_method_are_named_and_exist() -> None:
    named = set(re.findall(r"`((?:modeling|objective)/\w+\.py)`", PAGE))
    assert len(named) > 10
    assert not [path for path in sorted(named) if not (ROOT / "specforge_dspine" / path).is_file()]


def test_displayed_equations_are_closed() -> None:
    """GitHub renders the rest of a page as code after an open fence."""
    fences = re.findall(r"^ *```(\w*)$", PAGE, re.M)
    assert fences and fences[::2] == ["math"] * (len(fences) // 2) and set(fences[1::2]) == {""}
