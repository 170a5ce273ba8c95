"""Whole runs from offline features: one and two ranks, refusal, exact resume, the folder a run leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from specforge_dspine.formats.reader import load_draft
from specforge_dspine.modeling.attention_mask import block_mask
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.train import main
from specforge_dspine.training.run_checkpoints import newest_complete
from specforge_dspine.training.run_dir import exclusive
from tests.support.features import write_features
from tests.support.small import save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_qwen3

LAYERS = [0, 2, 4]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, its tokenizer and 16 feature files."""
    root = tmp_path_factory.mktemp("offline")
    build_qwen3(root / "target")
    save_tokenizer(root / "target")
    write_samples(root / "samples.jsonl", 16)
    write_features(root / "target", root / "samples.jsonl", root / "features", LAYERS)
    return root


def write_recipe(toy: Path, run: Path, **training: object) -> Path:
    document = tiny_recipe(
        toy / "target",
        run,
        data={"hidden_states_path": str(toy / "features")},
        training={"max_steps": 4, "total_steps": 4, "save_interval": 2} | training,
        tracking={"report_to": "tensorboard"},
    )
    path = run.parent / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def torchrun(ranks: int, recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)),
            *("-m", "specforge_dspine.train", "--recipe", str(recipe), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def finished(toy: Path) -> Path:
    run = toy / "run"
    assert main(["--recipe", str(write_recipe(toy, run))]) == 0
    return run


def test_a_run_leaves_metrics_recipe_checkpoints_tensorboard_and_exports(finished: Path) -> None:
    steps = metrics(finished)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert line["rows"] > 0 and line["ce"] > 0 and line["grad_norm"] > 0
        assert {"refined_accuracy", "refined_tau", "coverage", "candidate_mass", "lambda", "align_1"} <= line.keys()
    assert steps[0]["lambda"] == 0 and steps[-1]["lambda"] == pytest.approx(0.5 * steps[-1]["ce"], rel=1e-5)
    assert yaml.safe_load((finished / "recipe.yaml").read_text())["run_id"] == "tiny"
    assert (finished / "tiny-step2").is_dir() and (finished / "tiny-step4").is_dir()
    assert list(finished.rglob("events.out.tfevents*"))
    for layout in ("sglang", "specforge"):
        draft = load_draft(finished / "export" / layout).to_model()
        assert draft.transfer_codes.dtype is torch.float32


def test_logged_loss_is_the_sum_of_its_parts(finished: Path) -> None:
    for line in metrics(finished):
        backbone = 0.1 * line["ce"] + 0.9 * line["l1"]
        refinement = 0.1 * line["refined_ce"] + 0.9 * line["refined_l1"]
        align = line["lambda"] * (line["align_0"] + line["align_1"])
        assert line["loss"] == pytest.approx(backbone + refinement + align, rel=1e-4)


def test_exported_weights_are_the_checkpoints(finished: Path) -> None:
    state = torch.load(finished / "tiny-step4" / "training_state.pt", weights_only=False)["draft_state_dict"]
    draft = load_draft(finished / "export" / "specforge").tensors
    assert state.keys() == draft.keys()
    assert all(torch.equal(state[name], draft[name]) for name in state)
    written = [draft[f"injection.writes.{i}.weight"].abs().max() for i in range(2)]
    assert all(value > 0 for value in written), "training has moved the injection from its identity"


def test_a_run_leaves_the_environment_as_it_was(toy: Path) -> None:
    """Else the next process that starts from here would wait for, or listen at, this run's port."""
    before = dict(os.environ)
    assert main(["--recipe", str(write_recipe(toy, toy / "clean"))]) == 0
    assert dict(os.environ) == before and "MASTER_PORT" not in before


def test_a_used_directory_is_refused(toy: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    assert main(["--recipe", str(toy / "run.yaml")]) == 2
    assert "already holds a run; continue it with --resume" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_directory_in_use_is_refused(toy: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exclusive(finished):
        assert main(["--recipe", str(toy / "run.yaml"), "--resume"]) == 2
    assert "another process is running there" in capsys.readouterr().err


def test_resume_needs_a_run(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", str(write_recipe(toy, toy / "none")), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err


def test_resume_repeats_the_uninterrupted_run_bit_for_bit(toy: Path, finished: Path) -> None:
    run = toy / "halves"
    recipe = write_recipe(toy, run)
    assert main(["--recipe", str(recipe), "training.max_steps=2"]) == 0
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as stream:  # as if killed after a third step
        stream.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert main(["--recipe", str(recipe), "--resume"]) == 0
    whole, halves = metrics(finished), metrics(run)
    assert [line["step"] for line in halves] == [1, 2, 3, 4]
    for ours, theirs in zip(halves, whole, strict=True):
        for name in ("loss", "ce", "l1", "refined_ce", "refined_l1", "align_0", "grad_norm", "replaced_share"):
            assert ours[name] == theirs[name], (ours["step"], name)


@pytest.mark.ranks
def test_two_ranks_share_the_data(toy: Path) -> None:
    """16 files, 2 ranks × 2: two steps an epoch-half; every rank logs nothing but rank 0's reduced numbers."""
    run = toy / "ranks"
    recipe = write_recipe(toy, run, max_steps=3, total_steps=3)
    done = torchrun(2, recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = metrics(run)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["blocks"] == 24 / 2 for line in steps)  # a mean over ranks of 2 sequences × 6 anchors
    assert load_draft(run / "export" / "sglang") is not None
    assert newest_complete(run, "tiny") == run / "tiny-step3"
    (run / "tiny-step3" / "training_state_rank1.pt").unlink()  # as a kill between the ranks' writes leaves it
    assert newest_complete(run, "tiny") == run / "tiny-step2"


def test_one_override_turns_a_streamed_recipe_offline(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tiny_recipe(
        toy / "target",
        toy / "streamed",
        data={"prompts_path": str(toy / "samples.jsonl")},
        stream={"managed": {}},
    )
    (toy / "streamed.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    recipe = str(toy / "streamed.yaml")
    assert main(["--recipe", recipe, "--plan", f"data.hidden_states_path={toy / 'features'}"]) == 0
    assert f"offline features in {toy / 'features'}" in capsys.readouterr().out


def test_splitting_a_batch_does_not_change_the_step(toy: Path) -> None:
    """Σ numerators / Σ weights: 1 × 4 and 4 × 1 take the same first step, to float32 (speculators#942);
    with "shared", which is exact under either scope."""
    runs = {}
    for name, sizes in (("whole", (4, 1)), ("split", (1, 4))):
        recipe = write_recipe(
            toy, toy / name, batch_size=sizes[0], accumulation_steps=sizes[1], max_steps=2, total_steps=2
        )
        assert main(["--recipe", str(recipe), "dspine.normalization=shared"]) == 0
        runs[name] = metrics(toy / name)
    for whole, split in zip(runs["whole"], runs["split"], strict=True):
        for field in ("loss", "ce", "l1", "grad_norm", "refined_accuracy", "refined_tau"):
            assert split[field] == pytest.approx(whole[field], rel=1e-5), field


@pytest.fixture
def damaged(toy: Path, tmp_path: Path) -> Path:
    """The features with one NaN in the final state of one file."""
    folder = tmp_path / "features"
    folder.mkdir()
    for index, file in enumerate(sorted((toy / "features").iterdir())):
        record = torch.load(file)
        if index == 3:
            record["target_last_hidden_states"][0, 12, 5] = torch.nan
        torch.save(record, folder / file.name)
    return folder


def test_non_finite_features_are_left_out_and_named(
    toy: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """speculators#615: one NaN state must not reach the loss."""
    recipe = write_recipe(toy, tmp_path / "run", max_steps=8, total_steps=8)
    assert main(["--recipe", str(recipe), f"data.hidden_states_path={damaged}"]) == 0
    assert all(line["loss"] == line["loss"] and line["loss"] is not None for line in metrics(tmp_path / "run"))
    bad = sorted(file.stem for file in damaged.iterdir())[3]
    assert f"left out: target_last_hidden_states of sample e0000-{bad}" in capsys.readouterr().err


def test_features_of_other_taps_are_refused(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(toy, tmp_path / "run")
    assert main(["--recipe", str(recipe), "dspine.target_layer_ids=[0, 2]"]) == 2
    assert re.search(r"hidden_states of .* is 192 wide .* give 128", capsys.readouterr().err)


@pytest.fixture(scope="module")
def narrow(toy: Path) -> list[str]:
    """Overrides that train in bfloat16, from features in bfloat16."""
    folder = toy / "bfloat16"
    folder.mkdir()
    for file in sorted((toy / "features").iterdir()):
        record = torch.load(file)
        states = {name: value.bfloat16() for name, value in record.items() if value.is_floating_point()}
        torch.save(record | states, folder / file.name)
    return ["model.torch_dtype=bfloat16", f"data.hidden_states_path={folder}"]


def test_masters_move_below_bfloat16s_resolution_and_survive_a_resume(
    toy: Path, narrow: list[str], tmp_path: Path
) -> None:
    """ModelOpt#2322: a step of 1e-6 is lost on a bfloat16 weight of 1, on its float32 master it is not."""
    states = {}
    for name, cuts in (("whole", [[]]), ("halves", [["training.max_steps=2"], ["--resume"]])):
        recipe = write_recipe(toy, tmp_path / name, learning_rate=1e-6)
        for cut in cuts:
            assert main(["--recipe", str(recipe), *narrow, *cut]) == 0
        states[name] = torch.load(tmp_path / name / "tiny-step4" / "training_state.pt", weights_only=False)
    whole, halves = (states[name]["replicated_optimizer_state"]["fp32_params"] for name in ("whole", "halves"))
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))
    moved = [master for master in whole if not torch.equal(master, master.bfloat16().float())]
    assert len(moved) > len(whole) / 2
    weights = states["whole"]["draft_state_dict"]["norm.weight"]
    assert weights.dtype is torch.bfloat16 and torch.equal(weights, torch.ones_like(weights))
    for ours, theirs in zip(metrics(tmp_path / "halves"), metrics(tmp_path / "whole"), strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])


def test_bfloat16_trains_exports_and_loads(toy: Path, narrow: list[str], tmp_path: Path) -> None:
    """bfloat16 from features to served weights: float32 masters, a float32 table, and RoPE as it will be served."""
    run = tmp_path / "run"
    recipe = write_recipe(toy, run, max_steps=2, total_steps=2)
    assert main(["--recipe", str(recipe), *narrow]) == 0
    assert all(line["loss"] > 0 for line in metrics(run))
    rank_state = torch.load(run / "tiny-step2" / "training_state.pt", weights_only=False)
    masters = rank_state["replicated_optimizer_state"]["fp32_params"]
    assert all(value.dtype is torch.float32 for value in masters)

    ours = load_draft(run / "export" / "sglang").to_model()
    theirs = DSpineDraftModel.from_pretrained(
        run / "export" / "specforge", dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    outputs = []
    for draft in (ours, theirs):
        assert draft.fc.weight.dtype is torch.bfloat16
        assert all(b.dtype is not torch.bfloat16 for b in draft.buffers())
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(1, 4, 64, generator=generator).bfloat16()
        context = torch.randn(1, 5, 192, generator=generator).bfloat16()
        with torch.no_grad():
            out = draft(
                position_ids=torch.cat([torch.arange(2995, 3000), torch.arange(3000, 3004)])[None],
                attention_mask=block_mask(torch.tensor([[5]]), torch.tensor([[True]]), 5, 4, causal=True),
                noise_embedding=noise,
                target_hidden=context,
                predecessor_ids=torch.tensor([[[5, 6, 7]]]),
            )
        outputs.append(out.hidden)
    assert torch.equal(outputs[0], outputs[1])
