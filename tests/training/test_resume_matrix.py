"""Stopped and continued, bit for bit: both feeds, inside an epoch and at its last batch, one rank and two.

12 usable samples and windows of 2 micro-batches of 1: an epoch is 6 steps on one rank and 3 on two, so that step 4 is
inside an epoch and step 6 at the end of one, on both. A quarter of the streamed samples yields NaN states and is
dropped on the way, which must not shift anything either. Every second step looks at three held-out samples, which two
ranks share unevenly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.train import main
from tests.support.runs import assert_same_run, last_state, marked, metrics, train, write_toy_data
from tests.support.small import tiny_recipe

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.ranks]

TAPS, STEPS = [0, 2, 4], 9


@dataclass(frozen=True)
class Toy:
    """A folder with features, samples and their target, and a server of it."""

    root: Path
    server: ManagedServer

    def recipe(self, feed: str, run: Path) -> Path:
        """A recipe of 9 steps, about 3 epochs on two ranks."""
        sections: dict[str, Any] = {"data": {"hidden_states_path": str(self.root / "features")}}
        if feed == "streamed":
            sections = {
                "data": {"prompts_path": str(self.root / "samples.jsonl")},
                "stream": {"servers": [self.server.url]},
                "runtime": {"producer_lease": 3, "in_flight_high_watermark": 8, "in_flight_low_watermark": 4},
            }
        schedule = {"max_steps": STEPS, "total_steps": STEPS, "num_epochs": 3}
        training = schedule | {"batch_size": 1, "accumulation_steps": 2}
        heldout = {"hidden_states_path": str(self.root / "heldout"), "interval": 2}
        document = tiny_recipe(self.root / "target", run, training=training, heldout=heldout, **sections)
        path = run.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    root = write_toy_data(tmp_path_factory.mktemp("matrix"), TAPS)
    with ManagedServer(str(root / "target"), root / "server", TAPS, dtype="float32") as server:
        yield Toy(root, server)


def launch(recipe: Path, ranks: int, *arguments: str) -> None:
    """Train to the end; on one rank in this process, because that starts sooner."""
    if ranks == 1:
        assert main(["--recipe", str(recipe), *arguments]) == 0
    else:
        done = train(recipe, *arguments, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=["offline-1", "offline-2", "streamed-1", "streamed-2"])
def whole(toy: Toy, request: pytest.FixtureRequest) -> tuple[str, int, Path]:
    """Feed, ranks, and the run that nothing interrupted."""
    feed, ranks = request.param.split("-")
    run = toy.root / request.param
    launch(toy.recipe(feed, run), int(ranks))
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in metrics(run) if "eval/loss" in line] == list(range(2, STEPS + 1, 2))
    assert marked(run) is not None
    return feed, int(ranks), run


@pytest.mark.parametrize("stop", [4, 6], ids=["inside", "last_batch"])
def test_a_stopped_run_continues_bit_for_bit(toy: Toy, whole: tuple[str, int, Path], stop: int) -> None:
    feed, ranks, reference = whole
    run = reference.with_name(f"{reference.name}-{stop}")
    recipe = toy.recipe(feed, run)
    launch(recipe, ranks, f"training.max_steps={stop}")
    state = last_state(run)
    epoch = 12 // (2 * ranks)
    assert state["global_step"] == stop
    if feed == "offline":
        position = (state["epoch"], state["epoch_batch"])
        assert position == ((stop - 1) // epoch, 2 * ((stop - 1) % epoch + 1)), "where the name says"
    launch(recipe, ranks, "--resume")
    assert_same_run(run, reference)
    if feed == "streamed":
        assert delivered(run) == delivered(reference)
        assert not list(run.rglob("*.ckpt"))


def test_other_prompts_are_refused_before_a_server_is_asked(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    run = toy.root / "prompts"
    recipe = toy.recipe("streamed", run)
    launch(recipe, 1, "training.max_steps=2")
    other = toy.root / "other.jsonl"
    text = (toy.root / "samples.jsonl").read_text()
    other.write_text(text.replace(" 5,", " 6,", 1))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["--recipe", str(recipe), "--resume", f"data.prompts_path={other}"]
    assert main([*arguments, "stream.servers=['http://127.0.0.1:9']"]) == 2
    size = f"{len(text):,}"
    refusal = rf"another run: data was prompts of {size} bytes, sha256 \w+ and is prompts of {size} bytes, "
    assert re.search(refusal, capsys.readouterr().err)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def delivered(run: Path) -> dict[int, str]:
    """The samples by number, as ``delivered.jsonl`` has them."""
    entries = [json.loads(line) for line in (run / "delivered.jsonl").read_text().strip().splitlines()]
    assert sum("dropped" in entry for entry in entries) >= 4, "bad records were on the way"
    return {entry["number"]: entry["sample"] for entry in entries if "number" in entry}
