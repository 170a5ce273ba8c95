"""Held-out metrics during training: what they measure, what they leave alone, and the best checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import StepContext

from specforge_dspine.export import export_run
from specforge_dspine.formats.reader import load_draft
from specforge_dspine.train import main
from specforge_dspine.training.heldout import evaluate, loss, rank_sums, shard
from specforge_dspine.training.run_checkpoints import read_state
from specforge_dspine.training.run_logger import BEST
from specforge_dspine.training.strategy import DSpineTrainStrategy
from tests.support.drafts import make_batch, make_blocks, make_model
from tests.support.features import write_features
from tests.support.runs import marked
from tests.support.small import save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_qwen3

LAYERS = [0, 2, 4]


def batches(count: int) -> list[TrainBatch]:
    tensors = make_batch(count, 24, seed=4)
    for index in range(count):
        tensors["loss_mask"][index, 8 + 3 * index :] = 0
    return [TrainBatch([f"s{i}"], "dspine", {k: v[i : i + 1] for k, v in tensors.items()}) for i in range(count)]


def strategy_of(**options: Any) -> DSpineTrainStrategy:
    return DSpineTrainStrategy(make_model(**options), seed=3, warmup_ratio=0.1)


def test_every_rank_runs_as_many_forwards_and_every_sample_counts_once() -> None:
    for count, ranks in ((5, 2), (1, 4), (8, 4), (0, 2)):
        shards = [list(shard(count, rank, ranks)) for rank in range(ranks)]
        assert len({len(part) for part in shards}) == 1
        assert sorted(index for part in shards for index, counts in part if counts) == list(range(count))


def test_the_shares_of_two_ranks_are_the_set() -> None:
    """Five samples: the second rank's third forward is a stand-in, and counts for nothing."""
    strategy, context = strategy_of(), StepContext(10, 100)
    whole = rank_sums(strategy, batches(5), context, rank=0, ranks=1)
    shares = [rank_sums(strategy, batches(5), context, rank=rank, ranks=2) for rank in (0, 1)]
    for name, sums in whole.items():
        assert torch.allclose(shares[0][name] + shares[1][name], sums, rtol=1e-12), name
    assert shares[0]["rows"][1] + shares[1]["rows"][1] == 5


def test_sums_do_not_depend_on_how_the_set_is_batched() -> None:
    together = evaluate(strategy_of(), batches(5), StepContext(10, 100))
    merged = batches(5)
    tensors = {k: torch.cat([b.tensors[k] for b in merged]) for k in merged[0].tensors}
    one = TrainBatch([f"s{i}" for i in range(5)], "dspine", tensors)
    whole = evaluate(strategy_of(), [one], StepContext(10, 100))
    per_batch = {"eval/rows", "eval/blocks", "eval/supervised_tokens"}  # means over batches
    assert together.keys() == whole.keys() and "eval/align_2" in whole
    for name in whole.keys() - per_batch:
        assert together[name] == pytest.approx(whole[name], rel=1e-6), name


def test_nothing_is_replaced_and_the_mode_is_restored() -> None:
    strategy = strategy_of()
    context = StepContext(0, 100)  # early: in training half of the blocks would be replaced
    strategy.model.train()
    first = evaluate(strategy, batches(3), context)
    assert strategy.model.training and "eval/replaced_share" not in first
    strategy.model.eval()
    again = evaluate(strategy, batches(3), context)
    assert not strategy.model.training and first == again
    strategy.model.train()
    assert strategy.forward_loss(batches(1)[0], context).ratio_metrics["replacement_probability"][0] == 0.5


def test_the_loss_is_the_objective_over_the_whole_set() -> None:
    """Against the objective itself, given the set as one micro-batch."""
    for options in ({}, {"alignment": "ce"}, {"refinement": False}, {"injection": False, "alignment": "off"}):
        model = make_model(**options)
        batch, blocks = make_batch(), make_blocks([[4, 6, 11], [5, 13]])
        expected = model(**batch, blocks=blocks, beta=0.3)
        values = {}
        for name, (top, bottom) in expected.parts.items():
            ratios = (top / bottom.clamp_min(1e-12)).flatten().tolist()
            values |= {f"{name}_{i}": v for i, v in enumerate(ratios)} if name == "align" else {name: ratios[0]}
        ours = loss(values, model.draft_model.settings, "separate")
        assert ours == pytest.approx(float(expected.numerator / expected.denominator), rel=1e-9)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heldout")
    build_qwen3(root / "target")
    save_tokenizer(root / "target")
    for name, seed in (("train", 0), ("heldout", 1)):
        write_samples(root / f"{name}.jsonl", 12, seed=seed)
        write_features(root / "target", root / f"{name}.jsonl", root / name, LAYERS)
    return root


def write_recipe(toy: Path, name: str, heldout: Path) -> Path:
    document = tiny_recipe(
        toy / "target",
        toy / name,
        data={"hidden_states_path": str(toy / "train")},
        training={"max_steps": 6, "total_steps": 6, "save_interval": 6, "learning_rate": 1e-2},
        heldout={"hidden_states_path": str(heldout), "interval": 2},
    )
    path = toy / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_looks_at_held_out_samples_marks_the_best_and_trains_the_same(toy: Path) -> None:
    assert main(["--recipe", str(write_recipe(toy, "run", toy / "heldout"))]) == 0
    run = toy / "run"
    heldout = [line for line in lines(run) if "eval/loss" in line]
    assert [line["step"] for line in heldout] == [2, 4, 6]
    for line in heldout:
        assert line["eval/simulated_acc_len"] == line["eval/refined_tau"] >= 1
        assert {"eval/ce", "eval/align_1", "eval/accuracy_at_2", "eval/refined_accuracy_at_0"} <= line.keys()
        assert "eval/replacement_probability" not in line
    best = json.loads((run / "tiny.best_meta.json").read_text())
    top = max(line["eval/refined_tau"] for line in heldout)
    assert best["score"] == top
    assert best["step"] == next(line["step"] for line in heldout if line["eval/refined_tau"] == top)
    assert (run / "tiny-best").resolve().name == f"tiny-step{best['step']}"

    exported = load_draft(run / "export" / "specforge").tensors
    marked, newest = (read_state(run / f"tiny-step{step}")["draft_state_dict"] for step in (best["step"], 6))
    assert all(torch.equal(exported[name], marked[name]) for name in exported)
    export_run(run, "specforge", run / "newest", checkpoint="newest")
    again = load_draft(run / "newest").tensors
    assert all(torch.equal(again[name], newest[name]) for name in again)

    assert main(["--recipe", str(write_recipe(toy, "plain", toy / "heldout")), "heldout=null"]) == 0
    trained, plain = ([line for line in lines(toy / name) if "loss" in line] for name in ("run", "plain"))
    assert [line["loss"] for line in trained] == [line["loss"] for line in plain], "looking changes nothing"
    for line in trained:
        assert line["rows_per_second"] > 0 and line["tokens_per_second"] > 0 and 0 <= line["wait_share"] <= 1


def test_training_samples_are_not_held_out(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", str(write_recipe(toy, "same", toy / "train"))]) == 2
    assert "holds 12 of the training samples" in capsys.readouterr().err
    streamed = [
        "data.hidden_states_path=''",
        f"data.prompts_path={toy / 'train.jsonl'}",
        "stream={managed: {}}",
        "runtime={in_flight_low_watermark: 4, in_flight_high_watermark: 8}",
    ]
    assert main(["--recipe", str(toy / "same.yaml"), "--plan", *streamed]) == 2
    assert "holds 12 of the training samples" in capsys.readouterr().err
    assert main(["--recipe", str(write_recipe(toy, "none", toy / "nowhere"))]) == 2
    assert "heldout.hidden_states_path" in capsys.readouterr().err


def test_a_resumed_run_marks_the_best_again(toy: Path) -> None:
    """From its own log: a mark that was lost with the kill, or that names a checkpoint which is gone."""
    recipe = write_recipe(toy, "again", toy / "heldout")
    assert main(["--recipe", str(recipe)]) == 0
    run = toy / "again"
    whole = marked(run)
    for damage in ("lost", "too late"):
        shutil.rmtree(run / "tiny-step6")
        meta = run / "tiny.best_meta.json"
        if damage == "lost":
            meta.unlink(missing_ok=True)
        else:
            meta.write_text(json.dumps({"run_id": "tiny", "step": 6, "score": 9.9, "metric": BEST, "metrics": {}}))
        assert main(["--recipe", str(recipe), "--resume"]) == 0
        assert marked(run) == whole


def test_without_held_out_samples_no_old_mark_counts(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(toy, "dropped", toy / "heldout")
    assert main(["--recipe", str(recipe), "training.max_steps=4"]) == 0
    assert marked(toy / "dropped") is not None
    assert main(["--recipe", str(recipe), "--resume", "heldout=null"]) == 0
    assert marked(toy / "dropped") is None
    assert "checkpoint: tiny-step6" in capsys.readouterr().err


def test_a_bad_held_out_sample_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    strategy, context = strategy_of(), StepContext(10, 100)
    for _ in range(70):
        bad = batches(2)
        bad[1].tensors["target_last_hidden_states"][0, 3] = torch.nan
        values = evaluate(strategy, bad, context)
    assert strategy.bad_samples == {"s1"} and values["eval/rows"] > 0
