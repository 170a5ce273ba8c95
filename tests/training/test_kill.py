"""Runs that are really killed, again and again, and end as if nothing had happened.

SIGKILL for every process of the run, at moments drawn from a fixed seed: while it starts, while it trains, while it
writes a checkpoint of every step, while it exports. After each, the test does what a user would: ``--resume``, or a
start if there is nothing yet to resume.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from specforge_dspine.formats.reader import load_draft
from specforge_dspine.training.run_checkpoints import checkpoint_folders, checkpoint_problem
from tests.support.runs import (
    assert_equal,
    assert_same_run,
    kill_group,
    marked,
    processes_of,
    started,
    train,
    wait_until,
    write_toy_data,
)
from tests.support.small import tiny_recipe

pytestmark = pytest.mark.slow

SEED = 20261130


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_data(tmp_path_factory.mktemp("kill"), [0, 2, 4])


def write_recipe(toy: Path, name: str, steps: int, **sections: Any) -> Path:
    """A recipe of ``steps`` short steps with a checkpoint of each, two of them kept."""
    training = {"max_steps": steps, "total_steps": steps, "num_epochs": 1000, "batch_size": 1}
    document = tiny_recipe(
        toy / "target",
        toy / name,
        training=training | {"save_interval": 1, "max_checkpoints": 2},
        **({"data": {"hidden_states_path": str(toy / "features")}} | sections),
    )
    path = toy / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def logged(run: Path) -> int:
    """The last step that ``metrics.jsonl`` tells of; 0 without one."""
    path = run / "metrics.jsonl"
    steps = re.findall(r'"step": (\d+),', path.read_text(encoding="utf-8")) if path.exists() else []
    return int(steps[-1]) if steps else 0


class User:
    """Starts and continues one run as its messages say, and has it killed."""

    def __init__(self, recipe: Path, draw: random.Random) -> None:
        self.recipe, self.draw = recipe, draw
        self.run, self.log = recipe.with_suffix(""), recipe.with_suffix(".log")
        self.kills: Counter[str] = Counter()

    def arguments(self) -> list[str]:
        """``--resume`` once the directory holds a run: a checkpoint's folder, or a logged step."""
        return ["--resume"] if checkpoint_folders(self.run) or logged(self.run) else []

    def killed_before(self, seconds: float) -> None:
        """Killed at a random moment of its start, at the latest at its first new step."""
        goal, seconds = logged(self.run) + 1, self.draw.uniform(0, seconds)
        with started(self.recipe, self.log, *self.arguments()) as process:
            wait_until(lambda: logged(self.run) >= goal, process, seconds)
            self.kill(process, "start")

    def killed_after(self, steps: int, seconds: float) -> None:
        """Killed at a random moment after its ``steps``-th new step."""
        goal, pause = logged(self.run) + steps, self.draw.uniform(0, seconds)
        with started(self.recipe, self.log, *self.arguments()) as process:
            wait_until(lambda: logged(self.run) >= goal, process, 240)
            time.sleep(pause)
            self.kill(process, "training")

    def kill(self, process: subprocess.Popen[bytes], phase: str) -> None:
        """Kill the group and look at what is left; a process that failed by itself must have named a remedy."""
        status = process.poll()
        if status == 0:
            return  # too late: the run has ended
        if status is not None:
            self.remedy(status)
            return
        kill_group(process)
        self.kills[phase] += 1
        folders = checkpoint_folders(self.run)
        self.kills["while a checkpoint was written"] += any(list(folder.path.glob("*.tmp")) for folder in folders)
        self.kills["that left an unusable checkpoint"] += any(
            checkpoint_problem(folder) is not None for folder in folders
        )

    def remedy(self, status: int) -> None:
        """The one refusal that kills can lead to: the very first checkpoint was never finished."""
        said = self.log.read_text(errors="replace")[-3000:]
        found = re.search(r"holds no complete checkpoint \(.*\); remove (.*) to start again", said.splitlines()[-1])
        assert status == 2 and found, said
        for name in found[1].split(", "):
            shutil.rmtree(self.run / name)

    def finish(self) -> None:
        """Continue to the end."""
        done = train(self.recipe, *self.arguments())
        assert done.returncode == 0, done.stderr[-3000:]


def test_killed_twenty_times_and_not_a_bit_lost(toy: Path) -> None:
    steps = 300
    heldout = {"hidden_states_path": str(toy / "heldout"), "interval": 7}
    reference = write_recipe(toy, "whole", steps, heldout=heldout)
    assert train(reference).returncode == 0
    user = User(write_recipe(toy, "killed", steps, heldout=heldout), random.Random(SEED))
    for number in range(20):
        if number % 4 == 0:
            user.killed_before(9)
        else:
            user.killed_after(user.draw.randint(1, 4), 0.3)
    assert logged(user.run) < steps, "all of them before the end"
    user.killed_after(steps - logged(user.run), 1.5)  # in the last checkpoint, in the export, or too late
    user.finish()
    print(f"seed {SEED}: kills {dict(user.kills)}")
    assert user.kills["start"] + user.kills["training"] >= 20
    assert_same_run(user.run, toy / "whole")
    best = marked(user.run)
    assert best is not None
    kept = sorted({steps - 1, steps, best[0]})
    assert [folder.step for folder in checkpoint_folders(user.run)] == kept, "nothing is left over"
    for layout in ("sglang", "specforge"):
        ours, theirs = (load_draft(run / "export" / layout).tensors for run in (user.run, toy / "whole"))
        assert_equal(ours, theirs, layout)


@pytest.mark.server
def test_a_streamed_run_is_killed_with_its_server(toy: Path) -> None:
    """Three kills; the server ends by itself each time, and no record stays."""
    sections = {
        "data": {"prompts_path": str(toy / "samples.jsonl")},
        "stream": {"managed": {}},
        "runtime": {"producer_lease": 3, "in_flight_high_watermark": 8, "in_flight_low_watermark": 4},
    }
    reference = write_recipe(toy, "streamed", 40, **sections)
    assert train(reference).returncode == 0
    user = User(write_recipe(toy, "streamed-killed", 40, **sections), random.Random(SEED))
    for _ in range(3):
        user.killed_after(user.draw.randint(1, 8), 0.3)
        deadline = time.monotonic() + 10
        while processes_of(user.run):
            assert time.monotonic() < deadline, [process.cmdline() for process in processes_of(user.run)]
            time.sleep(0.1)
    user.finish()
    print(f"seed {SEED}: kills {dict(user.kills)}")
    assert user.kills["training"] == 3
    assert_same_run(user.run, toy / "streamed")
    dropped = [json.loads((run / "stream.json").read_text())["dropped"] for run in (user.run, toy / "streamed")]
    assert len(dropped[0]) >= 4 and dropped[0] == dropped[1], "bad records were on the way, and counted once"
    assert not processes_of(user.run) and not list(user.run.rglob("*.ckpt")) and not (user.run / "stream").exists()


@pytest.mark.ranks
def test_one_of_two_ranks_is_killed(toy: Path) -> None:
    """torchrun ends the other one and reports a failure; the run continues bit for bit."""
    reference = write_recipe(toy, "ranks", 60)
    assert train(reference, ranks=2).returncode == 0
    recipe = write_recipe(toy, "rank-killed", 60)
    run = recipe.with_suffix("")
    with started(recipe, recipe.with_suffix(".log"), ranks=2) as torchrun:
        assert wait_until(lambda: logged(run) >= 5, torchrun, 240), recipe.with_suffix(".log").read_text()[-3000:]
        workers = {int(worker.environ()["RANK"]): worker for worker in psutil.Process(torchrun.pid).children()}
        workers[1].kill()
        assert torchrun.wait(timeout=90) != 0
        gone, alive = psutil.wait_procs(workers.values(), timeout=10)
        assert len(gone) == 2 and not alive
    assert 5 <= logged(run) < 60
    done = train(recipe, "--resume", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(run, toy / "ranks")
