"""Whole runs that stream from a real SGLang server on the CPU: own servers, bad records, kills, two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge_dspine.formats.reader import load_draft
from tests.support.features import write_features
from tests.support.runs import POISON, command, metrics, processes_of, train
from tests.support.small import poison_samples, save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_llama, build_qwen3

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of both shapes, one of them with a token that makes states NaN, and samples."""
    root = tmp_path_factory.mktemp("streamed")
    for name, build in (("qwen3", build_qwen3), ("llama", build_llama)):
        save_tokenizer(build(root / name))
    save_tokenizer(build_qwen3(root / "poisoned", poisoned_token=POISON))
    write_samples(root / "samples.jsonl", 24)
    write_samples(root / "heldout.jsonl", 3, seed=9)
    write_features(root / "llama", root / "heldout.jsonl", root / "heldout", [0, 2, 4])
    return root


def write_recipe(toy: Path, run: str, target: str, samples: str = "samples.jsonl", **sections: dict) -> Path:  # type: ignore[type-arg]
    document = tiny_recipe(
        toy / target,
        toy / run,
        data={"prompts_path": str(toy / samples)},
        stream={"managed": {}} | sections.pop("stream", {}),
        runtime={"producer_lease": 4, "in_flight_high_watermark": 8, "in_flight_low_watermark": 4},
        **sections,
    )
    path = toy / f"{run}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def wait_until_gone(run: Path, seconds: float) -> float:
    started = time.monotonic()
    while processes_of(run):
        assert time.monotonic() - started < seconds, [p.cmdline() for p in processes_of(run)]
        time.sleep(0.2)
    return time.monotonic() - started


def windows(toy: Path) -> dict[str, dict[str, Any]]:
    """Sections of a run with windows of two micro-batches and a look at held-out samples in its last step."""
    return {
        "training": {"batch_size": 1, "accumulation_steps": 2},
        "heldout": {"hidden_states_path": str(toy / "heldout"), "interval": 4},
    }


def test_streamed_run_over_a_tied_head(toy: Path) -> None:
    """The whole path on a Llama-shaped target: verification, stream, windows of two micro-batches, a look at held-out
    samples, deletion after use, export."""
    run = toy / "run"
    done = train(write_recipe(toy, "run", "llama", **windows(toy)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "capture server verified" in done.stderr
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 4]
    assert metrics(run)[-1]["eval/refined_tau"] >= 1
    delivered = [json.loads(line) for line in (run / "delivered.jsonl").read_text().strip().splitlines()]
    assert [entry["position"] for entry in delivered] == list(range(8))
    assert all(entry["sample"].startswith("e0000-") for entry in delivered)
    report = json.loads((run / "stream.json").read_text())
    assert report["dropped"] == [] and report["delivered"] == 8 and report["beyond_max_steps"] == 16
    assert not list(run.rglob("*.ckpt")), "records are deleted after use"
    assert not processes_of(run)
    assert load_draft(run / "export" / "sglang").tensors["transfer_codes"].shape == (256, 16)


def test_streamed_resume_continues_the_plan(toy: Path) -> None:
    """Stopped after two steps and resumed: the same losses as the uninterrupted run, bit for bit."""
    sections = windows(toy)
    recipe = write_recipe(
        toy, "halves", "llama", **sections | {"training": sections["training"] | {"total_steps": 4}}
    )
    first = train(recipe, "training.max_steps=2")
    assert first.returncode == 0, first.stderr[-3000:]
    second = train(recipe, "--resume")
    assert second.returncode == 0, second.stderr[-3000:]
    whole, halves = metrics(toy / "run"), metrics(toy / "halves")
    assert [line["step"] for line in halves] == [1, 2, 3, 4, 4]
    for ours, theirs in zip(halves, whole, strict=True):
        for name in ("loss", "ce", "refined_ce", "grad_norm") if "loss" in theirs else ("eval/loss",):
            assert ours[name] == theirs[name], (ours["step"], name)


def test_bad_records_are_dropped_named_and_replaced(toy: Path) -> None:
    """Samples with the poisoned token yield NaN states: the run still takes its planned steps without them."""
    poison_samples(toy / "samples.jsonl", toy / "poisoned.jsonl", POISON)
    recipe = write_recipe(toy, "poisoned-run", "poisoned", "poisoned.jsonl", training={"max_steps": 6})
    done = train(recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    run = toy / "poisoned-run"
    assert len(metrics(run)) == 6
    report = json.loads((run / "stream.json").read_text())
    assert 1 <= len(report["dropped"]) <= 6
    assert all("hidden_states is nan at token" in reason for reason in report["dropped"])
    assert "dropped record 1: sample" in done.stderr + done.stdout

    limited = write_recipe(
        toy, "limited", "poisoned", "poisoned.jsonl", training={"max_steps": 6}, stream={"max_dropped": 0}
    )
    failed = train(limited)
    assert failed.returncode == 1
    assert "1 bad records, stream.max_dropped=0" in failed.stderr
    assert "\nerror: the stream ended: " in failed.stderr
    assert "\nFix the error above, then " in failed.stderr
    assert not processes_of(toy / "limited")


@pytest.mark.ranks
def test_two_ranks_stream_from_one_server(toy: Path) -> None:
    recipe = write_recipe(toy, "ranks", "qwen3", training={"max_steps": 3})
    done = train(recipe, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    run = toy / "ranks"
    assert len(metrics(run)) == 3
    assert len((run / "delivered.jsonl").read_text().strip().splitlines()) == 12
    assert not list(run.rglob("*.ckpt")) and not processes_of(run)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_an_ended_run_leaves_no_process(toy: Path, how: signal.Signals) -> None:
    """Ended in the middle of training; a killed run's server notices within 10 seconds."""
    name = f"ended-{how.name}"
    run = toy / name
    recipe = write_recipe(toy, name, "qwen3", training={"max_steps": 480, "num_epochs": 40})
    with open(toy / f"{name}.log", "w") as log:
        process = subprocess.Popen(command(recipe), stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None, (toy / f"{name}.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert processes_of(run), "the server is ours and alive"
        process.send_signal(how)
        code = process.wait(timeout=60)
    wait_until_gone(run, 10.0)
    assert not (run / "export").exists()
    if how is not signal.SIGKILL:
        assert code == 128 + how
        assert f"stopped by {how.name}; rerun with --resume to continue" in (toy / f"{name}.log").read_text()
        assert not list(run.rglob("*.ckpt"))
