"""Checkpoints of a real run, cut, flipped and half deleted: what is said, and which one the run goes on from."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from specforge_dspine.export import main as export
from specforge_dspine.formats.reader import load_draft
from specforge_dspine.train import main
from specforge_dspine.training.run_checkpoints import checkpoint_folders as folders
from specforge_dspine.training.run_checkpoints import checkpoint_problem, newest_complete, read_state
from specforge_dspine.utils.cli import setup_logging
from specforge_dspine.utils.errors import RecipeError
from tests.support.features import write_features
from tests.support.runs import assert_equal, assert_same_run
from tests.support.small import save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_qwen3

STEPS = 6


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with features, a recipe, and a finished run of 6 steps with a checkpoint of every second one."""
    root = tmp_path_factory.mktemp("checkpoints")
    save_tokenizer(build_qwen3(root / "target"))
    write_features(root / "target", write_samples(root / "samples.jsonl", 12), root / "features", [0, 2, 4])
    document = tiny_recipe(
        root / "target",
        root / "run",
        data={"hidden_states_path": str(root / "features")},
        training={"max_steps": STEPS, "total_steps": STEPS, "save_interval": 2},
    )
    (root / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    assert main(["--recipe", str(root / "recipe.yaml")]) == 0
    return root


@pytest.fixture
def run(toy: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    return shutil.copytree(toy / "run", tmp_path / "run", symlinks=True)


def flip(path: Path, position: float, bit: int = 3) -> None:
    """Turn one bit of a file, ``position`` of the way from its first byte to its last."""
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, share: float) -> None:
    with open(path, "r+b") as stream:
        stream.truncate(int(share * path.stat().st_size))


def only_temporary(folder: Path) -> None:
    """As a kill leaves it before the first file is in its place."""
    (folder / "training_state_rank0.pt").unlink()
    (folder / "training_state.pt").rename(folder / "training_state.pt.tmp")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def two_ranks(folder: Path) -> None:
    """As if a second rank had belonged to the run and been killed before its file was there."""
    state = read_state(folder) | {"world_size": 2}
    torch.save(state, folder / "new.pt")
    (folder / "new.pt").replace(folder / "training_state.pt")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: cut(f / "training_state.pt", 0.6), r"training_state\.pt is cut \([\d,]+ bytes"),
    "empty file": (lambda f: cut(f / "training_state.pt", 0), r"training_state\.pt is cut \(0 bytes"),
    "last byte gone": (lambda f: cut(f / "training_state_rank0.pt", 0.9999), r"training_state_rank0\.pt is cut"),
    "bit flipped": (lambda f: flip(f / "training_state.pt", 0.5), r"training_state\.pt is damaged \(record "),
    "bit flipped in a rank's": (
        lambda f: flip(f / "training_state_rank0.pt", 0.3),
        r"training_state_rank0\.pt is damaged \(record ",
    ),
    "shared state gone": (lambda f: (f / "training_state.pt").unlink(), r"training_state\.pt is missing"),
    "rank state gone": (lambda f: (f / "training_state_rank0.pt").unlink(), r"training_state_rank0\.pt is missing"),
    "second rank's state gone": (two_ranks, r"training_state_rank1\.pt is missing"),
    "not yet renamed": (only_temporary, r"training_state\.pt is missing"),
    "emptied": (empty, r"training_state\.pt is missing"),
    "of another step": (
        lambda f: shutil.copytree(f.parent / "tiny-step2", f, dirs_exist_ok=True),
        r"training_state\.pt is of step 2",
    ),
    "something else": (
        lambda f: torch.save({"weights": 1}, f / "training_state.pt"),
        r"training_state\.pt is no training state",
    ),
}


def test_the_newest_complete_one_is_taken_whatever_the_link_says(run: Path) -> None:
    assert newest_complete(run, "tiny") == run / "tiny-step6"
    (run / "tiny-latest").unlink()
    (run / "tiny-latest").symlink_to("tiny-step2")
    assert newest_complete(run, "tiny") == run / "tiny-step6"
    (run / "tiny-latest").unlink()
    assert newest_complete(run, "tiny") == run / "tiny-step6"
    shutil.move(run / "tiny-step6", run / "tiny-step10")  # 10 comes after 4 as a number, not as text
    state = read_state(run / "tiny-step10") | {"global_step": 10}
    torch.save(state, run / "tiny-step10" / "training_state.pt.tmp")
    (run / "tiny-step10" / "training_state.pt.tmp").replace(run / "tiny-step10" / "training_state.pt")
    assert newest_complete(run, "tiny") == run / "tiny-step10"
    assert newest_complete(run.parent / "nothing", "tiny") is None


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging()  # to this test's stderr
    damage, message = DAMAGES[name]
    damage(run / "tiny-step6")
    assert newest_complete(run, "tiny") == run / "tiny-step4"
    said = capsys.readouterr().err
    assert re.search(f"checkpoint tiny-step6 cannot be used: {message}.*; tiny-step4 is used instead", said)


def test_every_damaged_one_is_named_and_none_complete_is_an_error(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging()  # to this test's stderr
    cut(run / "tiny-step6" / "training_state.pt", 0.3)
    (run / "tiny-step4" / "training_state_rank0.pt").unlink()
    assert newest_complete(run, "tiny") == run / "tiny-step2"
    assert re.findall(r"checkpoint (\S+) cannot", capsys.readouterr().err) == ["tiny-step6", "tiny-step4"]
    flip(run / "tiny-step2" / "training_state.pt", 0.4)
    with pytest.raises(RecipeError, match=r"holds no complete checkpoint \(tiny-step6: .*tiny-step2: ") as caught:
        newest_complete(run, "tiny")
    assert "remove tiny-step6, tiny-step4, tiny-step2 to start again" in str(caught.value)


def test_checkpoints_of_another_run_are_not_taken(run: Path) -> None:
    with pytest.raises(RecipeError, match=r"run_id='small': the checkpoints in .* are of 'tiny'; give that run_id"):
        newest_complete(run, "small")


def test_any_flipped_bit_is_noticed_or_harmless(run: Path) -> None:
    """Wherever it falls in the file: refused, or in bytes that nobody reads (padding, times, versions)."""
    folder = folders(run)[-1]
    draw = random.Random(0)
    noticed = 0
    for file in sorted(folder.path.iterdir()):
        whole, reference = file.read_bytes(), torch.load(file, weights_only=False)
        for _ in range(150):
            flip(file, draw.random() if draw.random() < 0.5 else 1 - 0.02 * draw.random(), draw.randrange(8))
            if checkpoint_problem(folder):
                noticed += 1
            else:
                assert_equal(torch.load(file, weights_only=False), reference, file.name)
            file.write_bytes(whole)
    assert noticed > 60


@pytest.mark.parametrize("name", ["bit flipped", "rank state gone"])
def test_resume_goes_on_from_the_one_before(
    toy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped after step 5, whose checkpoint is damaged: from step 4, bit for bit as if nothing had happened."""
    recipe, run = str(toy / "recipe.yaml"), tmp_path / "run"
    assert main(["--recipe", recipe, f"output_dir={run}", "training.max_steps=5"]) == 0
    damage, message = DAMAGES[name]
    damage(run / "tiny-step5")
    assert main(["--recipe", recipe, f"output_dir={run}", "--resume"]) == 0
    said = capsys.readouterr().err
    assert re.search(f"checkpoint tiny-step5 cannot be used: {message}.*; tiny-step4 is used instead", said)
    assert_same_run(run, toy / "run")
    assert [folder.step for folder in folders(run)] == [2, 4, 6], "what was damaged is gone"


def test_resume_without_a_complete_checkpoint_touches_nothing(
    toy: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in folders(run):
        (folder.path / "training_state.pt").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["--recipe", str(toy / "recipe.yaml"), f"output_dir={run}"]
    assert main([*arguments, "--resume"]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    assert main(arguments) == 2, "nor is it taken for an empty directory"
    assert "already holds a run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for folder in folders(run):
        shutil.rmtree(folder.path)
    assert main([*arguments, "--resume"]) == 0, "as the message says"
    assert_same_run(run, toy / "run")


def test_export_takes_the_newest_complete_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "tiny-step6" / "training_state.pt", 0.5)
    assert export(["--run", str(run), "--to", "specforge", "--out", str(tmp_path / "out")]) == 0
    assert "tiny-step4 is used instead" in capsys.readouterr().err
    weights = load_draft(tmp_path / "out").tensors
    assert_equal(weights, dict(read_state(run / "tiny-step4")["draft_state_dict"]), "weights")
