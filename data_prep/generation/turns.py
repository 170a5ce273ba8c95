"""Has a served target answer conversations, turn by turn, and keeps what was sent and what came back.

A draft has to predict what its target says, so a data set's own answers do not matter, only its prompts. User turns
are answered in order, with the target's earlier answers as history. Each answer becomes one record::

    {"id", "conversation", "turn", "source", "prompt_ids", "output_ids", "finish": "stop" | "length", "target"}

whose ids are those that the server read and wrote, never encoded again. An answer that was cut off by the length
limit has no end token, and nothing that comes after its last token is taught.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from transformers import PreTrainedTokenizerBase

from data_prep.generation.server_pool import RequestFailed
from data_prep.pipeline.rows import guarded, key_of
from specforge_dspine.streaming.client import Completion, RequestRefused
from specforge_dspine.utils.chat_template import Message, answer_text, prompt_ids, unfinished_reasoning
from specforge_dspine.utils.files import to_line
from specforge_dspine.utils.invalid_row import InvalidRow
from specforge_dspine.utils.ledger import Ledger

MIN_OUTPUT_TOKENS = 2
"""An anchor needs a supervised token behind it, so shorter answers train nothing."""

MAX_TURNS = 1 << 12
"""Of one conversation: places in the ledger are row · MAX_TURNS + turn."""

SEEDS = 1 << 31


class Answering(Protocol):
    """A served target, as ``Servers.generate``."""

    def generate(self, prompt: list[int], **options: Any) -> Completion: ...


@dataclass(frozen=True)
class Settings:
    """How answers are generated.

    ``thinking`` None leaves the template's default. ``max_length`` bounds prompt + new tokens, so that the samples
    fit the trained length. ``temperature`` 0 is greedy; otherwise ``seed`` decides every draw, if the server heeds
    it. ``dtype`` is the server's: float32 and bfloat16 give different greedy answers.

    Raises:
        ValueError: a value out of range.
    """

    max_length: int
    dtype: str
    max_new_tokens: int = 64
    temperature: float = 0.0
    thinking: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < MIN_OUTPUT_TOKENS:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: at least {MIN_OUTPUT_TOKENS}")
        if self.max_length <= self.max_new_tokens:
            raise ValueError(
                f"max_length = {self.max_length} leaves no room for a prompt beside "
                f"max_new_tokens = {self.max_new_tokens}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature}: 0 (greedy) or more")
        if self.seed is not None and not self.temperature:
            raise ValueError(f"seed = {self.seed}, but greedy answers (temperature 0) draw nothing: leave it out")


@dataclass(frozen=True)
class Asked:
    """A conversation to be answered: its number among all rows, where it is from, and the answers it has already."""

    number: int
    name: str
    source: str
    file: str
    line: int | None
    messages: list[Message]
    answered: list[dict[str, Any]] = field(default_factory=list)

    @property
    def user_places(self) -> list[int]:
        """Indices of the user turns."""
        return [at for at, message in enumerate(self.messages) if message["role"] == "user"]


@dataclass(frozen=True)
class Answered:
    """What became of one turn: a record, or the reason for which there is none."""

    asked: Asked
    turn: int
    record: dict[str, Any] | None
    reason: str = ""
    detail: str = ""


class Turns:
    """Answers the turns of one conversation after another; any number of threads may do so."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: Settings, target: str, servers: Answering
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._target = target
        self._servers = servers
        self._encoding = threading.Lock()  # a tokenizer is not made for several threads

    def answer(self, asked: Asked) -> Iterator[list[Answered]]:
        """The turns that have no answer yet, in order. What cannot be answered ends the conversation.

        What comes together is to be kept together: a turn without an answer, and those behind it.
        """
        answered = list(asked.answered)
        turns = len(asked.user_places)
        for turn in range(len(answered), turns):
            try:
                answered.append(self._answer(asked, answered))
            except InvalidRow as odd:
                after = "an earlier turn has no answer", f"turn {turn}: {odd.reason}"
                lost = [Answered(asked, later, None, *after) for later in range(turn + 1, turns)]
                yield [Answered(asked, turn, None, odd.reason, odd.detail), *lost]
                return
            yield [Answered(asked, turn, answered[-1])]

    def _answer(self, asked: Asked, answered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The record of the turn after those ``answered``; an :class:`InvalidRow` if there is none."""
        with guarded():
            prompt = self._prompt(asked, answered)
        name = f"{asked.name}.{len(answered)}"
        try:
            answer = self._generate(name, prompt)
        except RequestRefused as refused:
            raise InvalidRow("refused by the server", str(refused)) from refused
        except RequestFailed as failed:
            raise InvalidRow("the server fails on it", str(failed)) from failed
        with guarded():
            self._check_answer(answer.output_ids)
        return {
            "id": name,
            "conversation": asked.name,
            "turn": len(answered),
            "source": asked.source,
            "prompt_ids": prompt,
            "output_ids": answer.output_ids,
            "finish": answer.finish,
            "target": self._target,
        }

    def _prompt(self, asked: Asked, answered: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids up to the next user turn, with the target's answers where the data set's own were."""
        users = asked.user_places
        history = asked.messages[: users[len(answered)] + 1]
        with self._encoding:
            if answered:
                last = answered[-1]
                if unfinished_reasoning(self._tokenizer, last["prompt_ids"], last["output_ids"]):
                    raise InvalidRow("the earlier answer was cut off while thinking", "give more --max-new-tokens")
            for user, record in zip(users, answered, strict=False):
                text = answer_text(self._tokenizer, record["output_ids"])
                history[user + 1] = {"role": "assistant", "content": text}
            prompt = prompt_ids(self._tokenizer, history, enable_thinking=self._settings.thinking)
        length = len(prompt) + self._settings.max_new_tokens
        if length > self._settings.max_length:
            raise InvalidRow(
                "prompt and new tokens exceed the maximum length", f"{length} > {self._settings.max_length}"
            )
        return prompt

    def _check_answer(self, ids: Sequence[int]) -> None:
        if len(ids) < MIN_OUTPUT_TOKENS:
            raise InvalidRow(f"fewer than {MIN_OUTPUT_TOKENS} generated tokens", f"{len(ids)}")
        with self._encoding:
            text = answer_text(self._tokenizer, ids)
        if not text.strip():
            raise InvalidRow("empty answer", f"{len(ids)} tokens of white space")

    def _generate(self, name: str, prompt: list[int]) -> Completion:
        settings = self._settings
        options: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "stop_token_ids": [self._tokenizer.eos_token_id],
        }
        if settings.seed is not None:
            options["seed"] = key_of(f"{settings.seed} {name}") % SEEDS
        return self._servers.generate(prompt, **options)


def answer_all(rows: Iterator[Asked], turns: Turns, ledger: Ledger, in_flight: int) -> Iterator[Answered]:
    """Answers ``rows`` in ``in_flight`` threads; every turn is in the ledger, committed, before it is yielded.

    Raises:
        ConnectionError: the servers are gone; what came before is in the ledger.
        WrongServer: another target answers.
    """
    tasks: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[list[Answered] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        while (asked := tasks.get()) is not None:
            try:
                for answered in turns.answer(asked):
                    results.put(answered)
                results.put(None)
            except BaseException as error:  # the main thread raises it
                results.put(error)

    # Daemons: whoever is interrupted does not wait for answers under way.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    under_way = 0
    try:
        for asked in rows:
            tasks.put(asked)
            under_way += 1
            while under_way >= 2 * in_flight or (under_way and not results.empty()):
                finished, answers = _collect(results, ledger)
                under_way -= finished
                yield from answers
        while under_way:
            finished, answers = _collect(results, ledger)
            under_way -= finished
            yield from answers
    finally:
        for _ in threads:
            tasks.put(None)


def _collect(
    results: queue.SimpleQueue[list[Answered] | BaseException | None], ledger: Ledger
) -> tuple[int, list[Answered]]:
    """Waits for a result, takes all there are, and commits them; how many conversations ended, and the answers."""
    finished = 0
    answers: list[Answered] = []
    found = results.get()
    failure: BaseException | None = None
    while True:
        if found is None:
            finished += 1
        elif isinstance(found, BaseException):
            failure = failure or found
        else:
            for answered in found:
                _write(answered, ledger)
            answers += found
        if results.empty():
            break
        found = results.get()
    ledger.commit()
    if failure is not None:
        raise failure
    return finished, answers


def _write(answered: Answered, ledger: Ledger) -> None:
    asked = answered.asked
    place = asked.number * MAX_TURNS + answered.turn
    if answered.record is not None:
        ledger.keep(to_line(answered.record), place=place)
    else:
        ledger.drop(
            asked.file, asked.line, answered.reason, answered.detail, id=asked.name, turn=answered.turn, place=place
        )


def earlier_answers(ledger: Ledger, number: int) -> tuple[list[dict[str, Any]], int]:
    """The records that row ``number`` has already, in order, and how many of its turns were dropped."""
    span = (number * MAX_TURNS, (number + 1) * MAX_TURNS)
    lines = ledger.db.execute("SELECT line FROM kept WHERE place >= ? AND place < ? ORDER BY place", span).fetchall()
    (dropped,) = ledger.db.execute("SELECT COUNT(*) FROM dropped WHERE place >= ? AND place < ?", span).fetchone()
    return [orjson.loads(line) for (line,) in lines], dropped
