"""Has a served target answer prompts, turn by turn, and makes a training sample of each answer.

A draft has to predict what its target says, so a data set's own answers do not matter, only its prompts.
User turns are answered in order, with the target's earlier answers as history. Each answer becomes one
sample (see ``chat.training_sample``), with ``"conversation"`` and ``"turn"`` besides.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data_prep.chat import answer_text, check_template, prompt_ids, training_sample, unfinished_reasoning
from data_prep.conversations import OddConversation, read_messages
from data_prep.files import file_sha256
from data_prep.ledger import Key, Ledger, Record
from specforge_dspine.stream.client import Completion, RequestRefused

FORMAT = 1
"""Version of the samples' format and of the rules below; part of a file's inputs."""

MIN_OUTPUT_TOKENS = 2
"""An anchor needs a supervised token behind it, so shorter answers train nothing."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors")


class Answering(Protocol):
    """A served target, as ``SGLangClient.generate``."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class Settings:
    """How answers are generated.

    ``thinking`` None leaves the template's default. ``max_length`` bounds prompt + new tokens, so that the
    samples fit the trained length. ``temperature`` 0 is greedy; other values are not reproducible. ``dtype``
    is the server's: float32 and bfloat16 give different greedy answers. ``batch`` requests are sent together.

    Raises:
        ValueError: a value out of range.
    """

    max_length: int
    dtype: str
    max_new_tokens: int = 64
    temperature: float = 0.0
    thinking: bool | None = None
    batch: int = 32

    def __post_init__(self) -> None:
        if self.max_new_tokens < MIN_OUTPUT_TOKENS:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: at least {MIN_OUTPUT_TOKENS}")
        if self.max_length <= self.max_new_tokens:
            raise ValueError(
                f"max_length = {self.max_length} leaves no room for a prompt beside "
                f"max_new_tokens = {self.max_new_tokens}"
            )
        if self.temperature < 0 or self.batch < 1:
            raise ValueError(f"temperature = {self.temperature} (≥ 0), batch = {self.batch} (≥ 1)")


def job_inputs(target: Path, tokenizer: PreTrainedTokenizerBase, prompts: Path, settings: Settings) -> dict[str, Any]:
    """Everything that the samples depend on, as JSON values: the key under which they may be reused."""
    return {
        "format": FORMAT,
        "target": _files_sha256(target, MODEL_FILES),
        "tokenizer": _files_sha256(target, TOKENIZER_FILES),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "prompts": file_sha256(prompts),
        "dtype": settings.dtype,
        "thinking": settings.thinking,
        "max_new_tokens": settings.max_new_tokens,
        "max_length": settings.max_length,
        "temperature": settings.temperature,
    }


def _files_sha256(folder: Path, patterns: Sequence[str]) -> str:
    """One hash over the names and contents of the matching files."""
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    total = hashlib.sha256()
    for path in tqdm(files, desc=f"hashing {folder.name}", unit=" files", leave=False):
        total.update(f"{path.name} {file_sha256(path)}\n".encode())
    return total.hexdigest()


class Regeneration:
    """Answers to ``conversations`` (rows of ``prompts``), kept in ``ledger``.

    Every user turn gets one record: a training sample, or ``{"conversation", "turn", "skipped": reason}``.

    Raises:
        ValueError: rows that are not what ``data_prep.prompts`` writes, or a tokenizer that cannot chat as
            the settings say.
    """

    def __init__(
        self,
        conversations: Sequence[dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        ledger: Ledger,
    ) -> None:
        check_template(tokenizer, settings.thinking)
        if tokenizer.eos_token_id is None:
            raise ValueError("the target's tokenizer has no eos token; set eos_token in tokenizer_config.json")
        self.tokenizer = tokenizer
        self.settings = settings
        self.ledger = ledger
        for number, row in enumerate(conversations, 1):
            _check_row(number, row)
        self._rows = {row["id"]: row for row in conversations}  # in the order of the prompts file
        self._users = {
            name: [at for at, part in enumerate(row["messages"]) if part["role"] == "user"]
            for name, row in self._rows.items()
        }
        if len(self._rows) < len(conversations):
            raise ValueError("conversation ids repeat in the prompts file; every id must be its own")

    def run(self, client: Answering) -> Counter[str]:
        """Generates what is missing, writes the file, and counts the reasons of what was skipped.

        Raises:
            ValueError: nothing at all could be used.
            ConnectionError: the server is gone; a later run continues.
        """
        turns = sum(map(len, self._users.values()))
        with tqdm(total=turns, desc="answers", unit=" turn") as bar:
            started, tokens = time.monotonic(), 0
            for batch in self._batches():
                missing = [key for key in batch if key not in self.ledger.records]
                if missing:
                    records = self._answer(missing, client)
                    self.ledger.append(records)
                    tokens += sum(len(_outputs(record)) for record in records if "skipped" not in record)
                    rate = tokens / (time.monotonic() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update(len(batch))
        return self._finish()

    def _batches(self) -> Iterator[list[Key]]:
        """All first turns, then all second turns, ...; a batch does not depend on what is done already.

        So a continued run sends the same batches as an undisturbed one.
        """
        for turn in range(max(map(len, self._users.values()), default=0)):
            keys = [(name, turn) for name, users in self._users.items() if turn < len(users)]
            for start in range(0, len(keys), self.settings.batch):
                yield keys[start : start + self.settings.batch]

    def _answer(self, keys: Sequence[Key], client: Answering) -> list[Record]:
        records: dict[Key, Record] = {}
        prompts: dict[Key, list[int]] = {}
        for key in keys:
            prompt = self._prompt(key, self._rows[key[0]]["messages"])
            if isinstance(prompt, str):
                records[key] = _skip(key, prompt)
            else:
                prompts[key] = prompt
        answers = self._generate(client, list(prompts.values())) if prompts else []
        for (key, prompt), answer in zip(prompts.items(), answers, strict=True):
            records[key] = self._record(key, self._rows[key[0]]["source"], prompt, answer)
        return [records[key] for key in keys]

    def _prompt(self, key: Key, messages: list[dict[str, str]]) -> list[int] | str:
        """Ids to send for a turn, or the reason for which it has none."""
        name, turn = key
        users = self._users[name]
        history = list(messages[: users[turn] + 1])
        for earlier in range(turn):
            record = self.ledger.records[name, earlier]
            if "skipped" in record:
                return "an earlier turn was skipped"
            answer = answer_text(self.tokenizer, _outputs(record))
            if unfinished_reasoning(answer):
                return "an earlier answer was cut off while thinking"
            history[users[earlier] + 1] = {"role": "assistant", "content": answer}
        ids = prompt_ids(self.tokenizer, history, enable_thinking=self.settings.thinking)
        if len(ids) + self.settings.max_new_tokens > self.settings.max_length:
            return "prompt and new tokens exceed the maximum length"
        return ids

    def _generate(self, client: Answering, prompts: list[list[int]]) -> list[Completion | str]:
        """Completions, or the server's reason for refusing a prompt."""

        def send(part: list[list[int]]) -> list[Completion]:
            return client.generate(
                part,
                max_new_tokens=self.settings.max_new_tokens,
                temperature=self.settings.temperature,
                stop_token_ids=[self.tokenizer.eos_token_id],
            )

        try:
            return list(send(prompts))
        except RequestRefused:  # one bad prompt refuses the batch: find it
            return [_or_reason(send, prompt) for prompt in prompts]

    def _record(self, key: Key, source: str, prompt: list[int], answer: Completion | str) -> Record:
        if isinstance(answer, str):
            return _skip(key, answer)
        if len(answer.output_ids) < MIN_OUTPUT_TOKENS:
            return _skip(key, f"fewer than {MIN_OUTPUT_TOKENS} generated tokens")
        if not answer_text(self.tokenizer, answer.output_ids).strip():
            return _skip(key, "empty answer")
        name, turn = key
        sample = training_sample(f"{name}.{turn}", prompt, answer.output_ids, source=source, finish=answer.finish)
        return {**sample, "conversation": name, "turn": turn}

    def _finish(self) -> Counter[str]:
        keys = [(name, turn) for name, users in self._users.items() for turn in range(len(users))]
        records = [self.ledger.records[key] for key in keys]
        skipped = Counter(record["skipped"] for record in records if "skipped" in record)
        samples = [record for record in records if "skipped" not in record]
        if not samples:
            raise ValueError(f"no prompt gave a training sample: {dict(skipped)}")
        facts = {
            "samples": len(samples),
            "generated_tokens": sum(len(_outputs(sample)) for sample in samples),
            "skipped": [record for record in records if "skipped" in record],
        }
        self.ledger.finish(samples, facts)
        return skipped


def record_key(record: Record) -> Key:
    """Where a record belongs: its conversation and turn."""
    return record["conversation"], record["turn"]


def _check_row(number: int, row: Any) -> None:
    advice = "write the prompts file with data_prep.prompts (its source file:PATH reads other data)"
    if not isinstance(row, dict) or not {"id", "source", "messages"} <= row.keys():
        raise ValueError(f"prompt {number} needs the fields id, source and messages; {advice}")
    try:
        read_messages(row, len(row["messages"]))
    except OddConversation as odd:
        raise ValueError(f"prompt {number}, {row['id']!r}: {odd}; {advice}") from odd


def _skip(key: Key, reason: str) -> Record:
    return {"conversation": key[0], "turn": key[1], "skipped": reason}


def _outputs(record: Record) -> list[int]:
    return record["input_ids"][record["prompt_tokens"] :]


def _or_reason(send: Callable[[list[list[int]]], list[Completion]], prompt: list[int]) -> Completion | str:
    try:
        return send([prompt])[0]
    except RequestRefused as refused:
        return f"refused by the server: {refused}"
