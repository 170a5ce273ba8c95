"""Each named mistake, patched into what training calls, is found by conformance or by the curve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mistakes import CONTROL, MISTAKES, REFERENCES, Caught, caught_by, toy_data_in

pytestmark = pytest.mark.slow

BY_CURVES = 12  # mistakes at least that the curve alone has to see


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Caught]]:
    """Both checks under each mistake, in one process: patches must not outlive their mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    toy_data_in(folder)
    results = {"before all": caught_by(CONTROL, folder)}
    results |= {mistake.name: caught_by(mistake, folder) for mistake in MISTAKES.values()}
    yield results | {CONTROL.name: caught_by(CONTROL, folder)}


def test_there_are_twenty_mistakes_and_more() -> None:
    assert len(MISTAKES) >= 20


def test_without_a_mistake_both_checks_pass(caught: dict[str, Caught]) -> None:
    """Before the first, and after every mistake was undone."""
    assert caught["before all"] == caught[CONTROL.name] == Caught([], [])


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_caught(caught: dict[str, Caught], name: str) -> None:
    assert caught[name].conformance or caught[name].curve


def test_the_curve_alone_sees_most(caught: dict[str, Caught]) -> None:
    assert sum(bool(caught[name].curve) for name in MISTAKES) >= BY_CURVES


def test_the_published_table_names_the_checks_that_find_each(caught: dict[str, Caught]) -> None:
    """``tests/curves/README.md``: a dash where a check finds nothing."""
    text = (REFERENCES / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    table = {row[0]: (row[1] != "–", row[2] != "–") for row in rows if len(row) == 3}
    for name in (CONTROL.name, *MISTAKES):
        assert table[name] == (bool(caught[name].conformance), bool(caught[name].curve)), name
