"""Names in code: US spelling, and none of the words to avoid. ``codespell`` sees no words inside of names."""

from __future__ import annotations

import re
import tokenize
from importlib.resources import files

import pytest

from tests.support import ROOT

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of snake_case, CamelCase and CONSTANTS
FOLDERS = ("specforge_dspine", "data_prep", "tests")


def words_to_avoid() -> set[str]:
    british = files("codespell_lib") / "data" / "dictionary_en-GB_to_en-US.txt"
    lists = [(ROOT / ".codespell" / "words.txt").read_text("utf-8"), british.read_text("utf-8")]
    return {line.partition("->")[0].lower() for text in lists for line in text.splitlines()}


def words_of(name: str) -> set[str]:
    return {word.lower() for word in WORD.findall(name)}


@pytest.mark.parametrize("name", ["mended_row", "OddEntry", "SOUGHT_VALUE", "behaviour_of", "isFlavour"])
def test_a_name_of_a_word_to_avoid_is_found(name: str) -> None:
    assert words_of(name) & words_to_avoid()


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_plain_words(folder: str) -> None:
    avoided, found = words_to_avoid(), set()
    for path in sorted((ROOT / folder).rglob("*.py")):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME and words_of(token.string) & avoided:
                    found.add(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert not found
