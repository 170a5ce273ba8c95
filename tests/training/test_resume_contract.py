"""A run is continued only as what it was: every change of objective, target, taps or data is refused by name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from specforge_dspine.train import main
from tests.support.features import write_features
from tests.support.small import save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_qwen3


def retrained(folder: Path) -> None:
    """The same target with other weights, in the same folder."""
    build_qwen3(folder / "target", seed=1)


def moved(folder: Path) -> None:
    shutil.copytree(folder / "target", folder / "copy")


def two_features_more(folder: Path) -> None:
    for name in ("zy", "zz"):  # as many as fill a batch
        shutil.copy(min((folder / "features").iterdir()), folder / "features" / f"{name}.ckpt")


def two_features_less(folder: Path) -> None:
    for path in sorted((folder / "features").iterdir())[:2]:
        path.unlink()


def changed_feature(folder: Path) -> None:
    """Another state under the same name and of the same size."""
    path = min((folder / "features").iterdir())
    record = torch.load(path)
    record["hidden_states"][0, 3, 5] += 1
    torch.save(record, path)


CHANGES: dict[str, tuple[Callable[[Path], object] | None, list[str], str]] = {
    "weight": (None, ["dspine.ce_weight=0.2"], r"dspine\.ce_weight was 0\.1 and is 0\.2;"),
    "rank": (None, ["dspine.transfer_rank=8"], r"dspine\.transfer_rank was 16 and is 8;"),
    "curriculum": (
        None,
        ["dspine.replacement_probability=0.25"],
        r"dspine\.replacement_probability was 0\.5 and is 0\.25",
    ),
    "taps": (None, ["dspine.target_layer_ids=[0, 1, 2]"], r"target_layer_ids was \[0, 2, 4\] and is \[0, 1, 2\]"),
    "batch": (None, ["training.batch_size=4"], r"training\.batch_size was 2 and is 4;"),
    "schedule": (None, ["training.total_steps=5"], r"training\.total_steps was 4 and is 5;"),
    "rate": (None, ["training.learning_rate=0.1"], r"training\.learning_rate was 0\.001 and is 0\.1;"),
    "seed": (None, ["training.seed=8"], r"training\.seed was 7 and is 8;"),
    "length": (None, ["data.max_length=32"], r"data\.max_length was 64 and is 32;"),
    "two": (
        None,
        ["dspine.ce_weight=0.2", "training.max_grad_norm=2"],
        r"dspine\.ce_weight was 0\.1 and is 0\.2; training\.max_grad_norm was 0\.5 and is 2\.0;",
    ),
    "weights": (
        retrained,
        [],
        r"model\.target_model_path/model\.safetensors was [\d,]+ bytes of .* and is [\d,]+ bytes",
    ),
    "target": (
        moved,
        ["model.target_model_path={folder}/copy"],
        r"model\.target_model_path was \S+/target and is \S+/copy",
    ),
    "more data": (two_features_more, [], r"data was 16 feature files of [\d,]+ bytes, .* and is 18 feature files"),
    "less data": (two_features_less, [], r"data was 16 feature files of [\d,]+ bytes, .* and is 14 feature files"),
    "other data": (changed_feature, [], r"data was 16 feature files of .* and is 16 feature files of"),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, features and a run that was stopped after two steps."""
    folder = tmp_path_factory.mktemp("contract")
    save_tokenizer(build_qwen3(folder / "target"))
    write_features(folder / "target", write_samples(folder / "samples.jsonl", 16), folder / "features", [0, 2, 4])
    document = tiny_recipe(
        folder / "target",
        folder / "run",
        data={"hidden_states_path": str(folder / "features")},
        training={"max_steps": 4, "total_steps": 4},
        tracking={"report_to": "tensorboard"},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    assert main(["--recipe", str(folder / "run.yaml"), "training.max_steps=2"]) == 0
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_resume_of_something_else_is_refused(
    half: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused, with what differs and nothing else, and without touching a byte of the run."""
    change, overrides, message = CHANGES[name]
    for part in ("target", "features"):
        shutil.copytree(half / part, tmp_path / part)  # copies keep the times, by which large files are known
    try:
        if change is not None:
            change(half)
        before = {path: path.read_bytes() for path in (half / "run").rglob("*") if path.is_file()}
        arguments = [override.format(folder=half) for override in overrides]
        assert main(["--recipe", str(half / "run.yaml"), "--resume", *arguments]) == 2
        error = capsys.readouterr().err
        assert re.search(r"tiny-step2 belongs to another run: .*" + message, error), error
        assert error.count(" was ") == max(1, len(overrides)), error
        assert {path: path.read_bytes() for path in (half / "run").rglob("*") if path.is_file()} == before
    finally:
        for part in ("target", "features"):
            shutil.rmtree(half / part)
            shutil.move(tmp_path / part, half / part)


def test_resume_finds_the_same_data_elsewhere(half: Path) -> None:
    shutil.copytree(half / "features", half / "moved")
    run = shutil.copytree(half / "run", half / "elsewhere", symlinks=True)
    recipe = str(half / "run.yaml")
    assert (
        main(["--recipe", recipe, "--resume", f"output_dir={run}", f"data.hidden_states_path={half / 'moved'}"]) == 0
    )
