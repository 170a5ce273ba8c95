"""Runs of the training command: something to train on, processes of their own, and comparison bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from specforge_dspine.training.run_checkpoints import checkpoint_folders
from tests.support.features import write_features
from tests.support.small import poison_samples, save_tokenizer, write_samples
from tests.support.targets import build_qwen3

POISON = 77
CLOCKS = ("time", "wait_share")  # and what ends or begins as below: of the wall clock, never equal


def write_toy_data(root: Path, taps: list[int]) -> Path:
    """A target, 16 samples of which every fourth makes its states NaN, features of the 12 others, and of 3 that are
    held out, in ``root``."""
    save_tokenizer(build_qwen3(root / "target", poisoned_token=POISON))
    poison_samples(write_samples(root / "all.jsonl", 16), root / "samples.jsonl", POISON)
    lines = (root / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    good = [line for line in lines if POISON not in json.loads(line)["input_ids"]]
    (root / "good.jsonl").write_text("".join(good), encoding="utf-8")
    write_features(root / "target", root / "good.jsonl", root / "features", taps)
    write_samples(root / "heldout.jsonl", 3, seed=5)
    write_features(root / "target", root / "heldout.jsonl", root / "heldout", taps)
    return root


def marked(run: Path) -> tuple[int, float] | None:
    """Step and score of the checkpoint that is marked as the best; None without a mark."""
    path = next(iter(run.glob("*.best_meta.json")), None)
    if path is None:
        return None
    best = json.loads(path.read_text(encoding="utf-8"))
    assert (run / f"{best['run_id']}-best").resolve() == (run / f"{best['run_id']}-step{best['step']}").resolve()
    return best["step"], best["score"]


def command(recipe: Path, *arguments: str, ranks: int = 1) -> list[str]:
    launch = ["-m"]
    if ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    return [sys.executable, *launch, "specforge_dspine.train", "--recipe", str(recipe), *arguments]


def train(recipe: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Train in processes of their own."""
    return subprocess.run(
        command(recipe, *arguments, ranks=ranks),
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@contextmanager
def started(recipe: Path, log: Path, *arguments: str, ranks: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """The same in the background, leading a process group; whatever is left of the group is killed at the end."""
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            command(recipe, *arguments, ranks=ranks),
            stdout=stream,
            stderr=stream,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_group(process)


def kill_group(leader: subprocess.Popen[bytes]) -> int:
    """SIGKILL for every process of the group that ``leader`` leads; returns the leader's exit status."""
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(leader.pid, signal.SIGKILL)
    return leader.wait(timeout=30)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether ``condition`` came true; False once ``process`` has ended or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def processes_of(run: Path) -> list[psutil.Process]:
    """Living processes whose command line or environment names the run's directory (its server, its guard)."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if any(str(run) in word for word in words) and process.pid != os.getpid():
            found.append(process)
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def last_state(run: Path) -> dict[str, Any]:
    """The shared state of the checkpoint of the highest step."""
    return torch.load(checkpoint_folders(run)[-1].path / "training_state.pt", weights_only=False)


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Every metric of every step, clocks excepted, the last checkpoint's weights and optimizer, and the mark of the
    best one, bit for bit."""
    mine, reference = metrics(ours), metrics(theirs)
    assert [line["step"] for line in mine] == [line["step"] for line in reference]
    for line, wanted in zip(mine, reference, strict=True):
        assert line.keys() == wanted.keys()
        for name, value in wanted.items():
            if name in CLOCKS or name.startswith("perf/") or name.endswith("_per_second"):
                continue
            assert line[name] == value, (line["step"], name, line[name], value)
    assert marked(ours) == marked(theirs)
    states = [last_state(run) for run in (ours, theirs)]
    assert states[0]["global_step"] == states[1]["global_step"] == reference[-1]["step"]
    for part in ("draft_state_dict", "replicated_optimizer_state"):
        assert_equal(states[0][part], states[1][part], part)


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    """Equality of nested states; tensors bit for bit."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            assert_equal(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where
