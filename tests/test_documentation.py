"""Documents and what they name: links, anchors, files, make targets, commands, and options of commands."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import re
import runpy
import sys
import tomllib
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from specforge_dspine.cli import COMMANDS
from specforge_dspine.utils.versions import VERSION
from tests.support import ROOT

DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/curves/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
README_WORDS = 1000
FENCE = re.compile(r"^( *)```.*?^\1``` *$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(
    r"(?<![\w./-])(?:recipes|docs|tests|specforge_dspine|data_prep)/[\w./-]+\.(?:yaml|md|py|json|safetensors)"
)
MODULE = re.compile(r"(?<!\S)-m ((?:specforge_dspine|data_prep)\.[\w.]*\w)|(?:^|[ /])specforge-dspine ([a-z][a-z-]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


class NamedCommand(NamedTuple):
    """A command in a document: its ``module``, and the words after it."""

    module: str
    words: str


def prose(document: Path) -> str:
    """The text without fenced blocks and code spans."""
    return SPAN.sub("", FENCE.sub("", document.read_text(encoding="utf-8")))


def code_lines(document: Path) -> list[str]:
    """Lines of code blocks, continued ones joined and without comments; and code spans."""
    text = document.read_text(encoding="utf-8")
    fenced = "\n".join(match.group() for match in FENCE.finditer(text))
    rest = FENCE.sub("", text)
    indented = "\n".join(line for line in rest.splitlines() if line.startswith("    "))
    blocks = re.sub(r"\\\n\s*", " ", f"{fenced}\n{indented}")
    lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in blocks.splitlines()]
    return [*lines, *SPAN.findall(rest)]


def commands(document: Path) -> list[NamedCommand]:
    """The commands of this package that ``document`` shows; placeholders such as ``data_prep.X`` are none."""
    found = []
    for line in code_lines(document):
        for match in MODULE.finditer(line):
            module, name = match.groups()
            if name is not None:
                assert name in COMMANDS, f"{document.name}: specforge-dspine {name}"
                module = f"specforge_dspine.{COMMANDS[name][0]}"
            if not module.rpartition(".")[2].isupper():
                found.append(NamedCommand(module, line[match.end() :]))
    return found


@functools.cache
def help_text(module: str, *words: str) -> str:
    """What ``python -m module words --help`` prints; run in this process, where torch is loaded already."""
    before, shown = sys.argv, io.StringIO()
    sys.argv = [module, *words, "--help"]
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
            warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    assert ended.value.code == 0
    return shown.getvalue()


@functools.cache
def texts_of_the_code() -> str:
    """Every string of the product's code, with "..." for what an f-string fills in."""
    found = []
    for path in sorted([*(ROOT / "specforge_dspine").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        getattr(part, "value", "...") if isinstance(part, ast.Constant) else "..."
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of ``document``."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text(encoding="utf-8")), re.M)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)
    return set(slugs)


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    broken = set()
    for link in LINK.findall(prose(document)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.add(link)
    assert broken == set()


@every_document
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert {name for name in FILE.findall(text) if not (ROOT / name).exists()} == set()


@every_document
def test_named_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {match.group(1) for line in code_lines(document) if (match := re.match(r"make ([a-z-]+)", line))}
    assert {target for target in named if not re.search(rf"^{target}:", makefile, re.M)} == set()


@every_document
def test_named_commands_exist(document: Path) -> None:
    missing = {
        module
        for module, _ in commands(document)
        if (spec := importlib.util.find_spec(module)) is None
        or (spec.submodule_search_locations and not importlib.util.find_spec(f"{module}.__main__"))
    }
    assert missing == set()


@every_document
def test_options_are_those_of_the_command(document: Path) -> None:
    unknown = set()
    for module, words in commands(document):
        if not (options := set(OPTION.findall(words)) - {"--help"}):
            continue
        first = words.split()[0]
        subcommands = re.search(r"\{([\w,-]+)\} \.\.\.", help_text(module))
        choice = [first] if subcommands and first in subcommands.group(1).split(",") else []
        known = set(OPTION.findall(help_text(module, *choice)))
        unknown |= {f"{module} {' '.join(choice)} {option}" for option in options - known}
    assert unknown == set()


def test_error_messages_are_those_of_the_code() -> None:
    """The page's fragments, between dots, are in some string of the code."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \|", page, re.M)
    pieces = {piece.strip() for cell in cells for span in SPAN.findall(cell) for piece in span.split("...")}
    assert len(pieces) > 100
    assert {piece for piece in pieces if piece not in texts_of_the_code()} == set()


def test_make_lists_its_targets_by_default() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.M)
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.M)
    assert targets[0] == "help" and phony and set(phony.group(1).split()) == set(targets)
    assert [target for target in targets if not re.search(rf"^{target}:.* ## \S", makefile, re.M)] == []


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["title"].split(":")[0]) == (VERSION, project["name"])
