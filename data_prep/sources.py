"""Where prompts come from: two packages that need no hub, files, and a hub.

A source is a pair of streams of conversations, one to draw held-out prompts from and one for training.
Finite sources are shuffled once and give the same stream twice, so that what one has taken the other never
sees; procedural tasks come from two seeds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from data_prep.chat import Message
from data_prep.conversations import OddConversation, file_entries, read_messages

CHATTERBOT = "chatterbot-corpus"
CHATTERBOT_FOLDER = "chatterbot_corpus/data/english/"

GYM_TASKS = ("gsm_symbolic", "leg_counting", "calendar_arithmetic", "time_intervals", "chain_sum")
"""Tasks of reasoning-gym that a small chat model answers in sentences."""

GYM_SIZE = 1_000_000
"""Problems that exist per task and seed; they are made when they are drawn."""

HELDOUT_SEED_OFFSET = 1_000_003
"""Held-out procedural problems come from ``seed + HELDOUT_SEED_OFFSET``."""

SYNTAX = "chatterbot, reasoning-gym, file:PATH or hub:NAME[@CONFIG][:SPLIT]"


@dataclass(frozen=True)
class Candidate:
    """A conversation and where it stands: source name, line or row number (1-based)."""

    source: str
    line: int
    messages: list[Message]


@dataclass(frozen=True)
class Skip:
    """An entry that was left out, and why."""

    source: str
    line: int
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Source:
    """Streams to draw from; ``endless`` ones need a limit."""

    heldout: Iterator[Candidate]
    train: Iterator[Candidate]
    endless: bool = False


def open_source(spec: str, seed: int, max_turns: int, skip: Callable[[Skip], None]) -> Source:
    """The source that ``spec`` names (:data:`SYNTAX`); ``skip`` is told of each entry that is none.

    Raises:
        ValueError: unknown syntax, a missing package, or a file that cannot be read.
    """
    kind, _, name = spec.partition(":")
    if spec == "reasoning-gym":
        return Source(_gym(seed + HELDOUT_SEED_OFFSET), _gym(seed), endless=True)
    if spec == "chatterbot":
        label, raw = spec, _chatterbot()
    elif kind == "file" and name:
        label, raw = f"file:{Path(name).name}", _file(Path(name))
    elif kind == "hub" and name:
        label, raw = spec, _hub(name)
    else:
        raise ValueError(f"source {spec!r} is unknown: use {SYNTAX}, separated by commas")
    found = list(_conversations(label, raw, max_turns, skip))
    random.Random(f"{seed} {spec}").shuffle(found)
    stream = iter(found)
    return Source(stream, stream)


def _conversations(
    label: str, raw: Iterable[tuple[int, Any]], max_turns: int, skip: Callable[[Skip], None]
) -> Iterator[Candidate]:
    for line, entry in tqdm(raw, desc=f"reading {label}", unit=" entries", leave=False):
        try:
            if isinstance(entry, OddConversation):
                raise entry
            yield Candidate(label, line, read_messages(entry, max_turns))
        except OddConversation as odd:
            skip(Skip(label, line, odd.reason, odd.detail))


def _file(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise ValueError(f"source file:{path}: there is no such file")
    return file_entries(path)


def _hub(name: str) -> Iterator[tuple[int, Any]]:
    """Rows of a data set on the hub, or of a local folder that ``datasets`` can read."""
    from datasets import load_dataset

    match = re.fullmatch(r"([^@:]+)(?:@([^@:]+))?(?::([^@:]+))?", name)
    if match is None:
        raise ValueError(f"source hub:{name}: use hub:NAME[@CONFIG][:SPLIT]")
    path, config, split = match.groups()
    return enumerate(load_dataset(path, config, split=split or "train"), 1)


def _chatterbot() -> Iterator[tuple[int, Any]]:
    """Alternating turns from the package's English YAML files, which are read as data."""
    try:
        files = distribution(CHATTERBOT).files or []
    except PackageNotFoundError:
        raise ValueError(
            f"source chatterbot: the package is not installed; run: pip install --no-deps {CHATTERBOT}==1.3.3"
        ) from None
    for file in sorted(files, key=str):
        if str(file).startswith(CHATTERBOT_FOLDER) and file.suffix == ".yml":
            yield from _chatterbot_file(file.read_text(encoding="utf-8"), file.name)


def _chatterbot_file(text: str, name: str) -> Iterator[tuple[int, Any]]:
    # Nodes instead of values: they know their line, and a scalar like "42" or "yes" stays text.
    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    lists = {key.value: value for key, value in root.value}
    for conversation in lists["conversations"].value:
        line = conversation.start_mark.line + 1
        if not all(isinstance(turn, yaml.ScalarNode) for turn in conversation.value):
            yield line, OddConversation("content is not text", name)
            continue
        roles = ("user", "assistant") * len(conversation.value)
        turns = [{"role": role, "content": turn.value} for role, turn in zip(roles, conversation.value, strict=False)]
        yield line, {"messages": turns}


def _gym(seed: int) -> Iterator[Candidate]:
    import reasoning_gym

    tasks = {name: reasoning_gym.create_dataset(name, size=GYM_SIZE, seed=seed) for name in GYM_TASKS}
    for number in count():
        if number == GYM_SIZE:
            return
        for name, task in tasks.items():
            question = task[number]["question"]
            yield Candidate(f"reasoning-gym/{name}", number + 1, [{"role": "user", "content": question}])
