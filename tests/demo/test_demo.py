"""Stages of the demo: options that each command accepts, and inputs that an earlier stage writes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge_dspine.demo import __main__ as demo
from specforge_dspine.demo import prepare
from specforge_dspine.demo.prepare import DataOptions, PrepareOptions
from specforge_dspine.utils.cli import add_options, read_options
from specforge_dspine.utils.stages import Stages
from tests.support import ROOT

READS = ("input", "samples", "sets", "evaluations")
WRITES = ("out", "output", "heldout")


class CheckedStages(Stages):
    """Checks the options of every stage, and makes empty outputs instead of running it."""

    done: list[str]

    def __enter__(self) -> CheckedStages:
        CheckedStages.done = []
        return self

    def run(self, module: str, *arguments: object, name: str | None = None, **_: Any) -> None:
        kind = importlib.import_module(module).main.args[0].options
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_options(parser, kind)
        options = read_options(kind, vars(parser.parse_intermixed_args(list(map(str, arguments)))))
        for path in paths_of(options, READS):
            assert path.exists(), f"{module} reads {path}, which no stage wrote"
        for path in paths_of(options, WRITES):
            (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
            if path.suffix:
                path.touch()
        if module == "specforge_dspine.train":
            run_dir = yaml.safe_load(options.recipe.read_text())["output_dir"]
            (Path(run_dir) / "export" / "sglang").mkdir(parents=True)
        self.done.append(name or module.rpartition(".")[2])


def paths_of(options: Any, fields: tuple[str, ...]) -> Iterator[Path]:
    """Paths that ``options`` names in ``fields``: absolute ones, for the test's lie in a folder of its own."""
    for field in fields:
        value = getattr(options, field, None) or ()
        for each in value if isinstance(value, tuple) else [value]:
            path = Path(str(each).rpartition("=")[2])
            if path.is_absolute():
                yield path


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's recipe with its folders in ``tmp_path``; no server starts."""

    @contextlib.contextmanager
    def servers(*_: object) -> Iterator[list[str]]:
        yield ["http://127.0.0.1:1", "http://127.0.0.1:2"]

    monkeypatch.setattr(demo, "Stages", CheckedStages)
    monkeypatch.setattr(prepare, "Stages", CheckedStages)
    monkeypatch.setattr(prepare, "response_servers", servers)
    document = {
        "base": str(ROOT / "recipes" / "smollm2_cpu.yaml"),
        "model": {"target_model_path": str(tmp_path / "target")},
        "heldout": {"hidden_states_path": str(tmp_path / "demo" / "heldout"), "interval": 10},
        "output_dir": str(tmp_path / "demo" / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "recipe.yaml"


def test_the_demo_runs_commands_as_they_are(recipe: Path, tmp_path: Path) -> None:
    demo.demo(DataOptions(recipe=recipe, out=tmp_path / "demo"))
    done = CheckedStages.done
    assert done[:2] == ["target", "prompts"] and done[-1] == "report"
    assert {"regenerate train", "tokenize heldout", "capture heldout", "inspect", "train"} < set(done)
    assert {f"evaluate {name}" for name in demo.EVALUATIONS} < set(done)
    assert (tmp_path / "demo" / "seconds.json").exists()


def test_benchmarks_and_all_splits_are_captured(recipe: Path, tmp_path: Path) -> None:
    splits = ("train", "heldout", "mt-bench")
    prepare.prepare(PrepareOptions(recipe=recipe, out=tmp_path / "data", benchmarks=("mt-bench",), capture=splits))
    assert {f"capture {split}" for split in splits} < set(CheckedStages.done)
    assert all((tmp_path / "data" / split).is_dir() for split in splits)


def test_a_split_that_is_not_made_cannot_be_captured(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--capture mt-bench: the splits are train, heldout"):
        PrepareOptions(recipe=recipe, out=tmp_path, capture=("mt-bench",))
