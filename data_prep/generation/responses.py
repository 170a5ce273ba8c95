"""Responses of a served target to conversations, turn by turn, with the ids that were sent and that came back.

A draft has to predict its target, so only a data set's prompts matter. The target responds to the user turns in
order, with its earlier responses as history. Each response becomes one record::

    {"id", "conversation", "turn", "source", "prompt_ids", "output_ids", "finish": "stop" | "length", "target"}

whose ids are those that the server read and wrote, never encoded again. A response that the length limit cut has no
end token, and nothing that comes after its last token is taught.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import orjson
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data_prep.cleaning.conversations import read_messages
from data_prep.generation.server_pool import ServerPool
from data_prep.pipeline.rows import errors_as_invalid_row, hash_64, row_name
from data_prep.readers.inputs import Inputs, rows_of
from specforge_dspine.streaming.client import Completion
from specforge_dspine.utils.chat_template import THINKING, Message, prompt_ids, response_text, unfinished_reasoning
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import to_line
from specforge_dspine.utils.ledger import Ledger

MIN_OUTPUT_TOKENS = 2  # an anchor needs a supervised token after it, so shorter responses train nothing
MAX_TURNS = 1 << 12  # of one conversation: places in the ledger are row · MAX_TURNS + turn
SEEDS = 1 << 31


class GenerationSettings(Options):
    """How responses are generated; everything here decides them."""

    max_new_tokens: int = option("tokens of each response", default=64, ge=MIN_OUTPUT_TOKENS, metavar="N")
    max_length: int = option("tokens of prompt and response (default: the target's context)", default=0, metavar="N")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "of the server; default: the target's", default=None
    )
    temperature: float = option("0 is greedy", default=0.0, ge=0, metavar="T")
    seed: int | None = option("of the draws, where the temperature is not 0", default=None, metavar="N")
    thinking: Literal["none", "off", "on"] = option("the template's switch", default="none")


@dataclass(frozen=True)
class Conversation:
    """A conversation to respond to: its number among all rows, its source, and the records it has already."""

    number: int
    name: str
    source: str
    file: str
    line: int | None
    messages: list[Message]
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def user_places(self) -> list[int]:
        """Indices of the user turns."""
        return [at for at, message in enumerate(self.messages) if message["role"] == "user"]


class Conversations:
    """The conversations of ``inputs``, told apart by id; rows that are none are dropped on the way."""

    def __init__(self, inputs: Inputs, ledger: Ledger, limit: int | None) -> None:
        self._rows = islice(rows_of(inputs), limit)
        self._ledger = ledger
        self._names: set[int] = set()
        self.rows_in = 0  # responses wanted so far, and rows that are no conversation

    def unanswered(self, bar: tqdm[Any]) -> Iterator[Conversation]:
        """Conversations with turns that have no response yet; the others count as done in ``bar``."""
        for number, (source, line, entry) in enumerate(self._rows):
            records, dropped = self._earlier(number)
            try:
                with errors_as_invalid_row():
                    conversation = replace(self._read(number, source, line, entry), records=records)
            except InvalidRow as error:
                self.rows_in += 1
                if not dropped:
                    self._ledger.drop(source, line, error.reason, error.detail, place=number * MAX_TURNS)
                continue
            turns = len(conversation.user_places)
            self.rows_in += turns
            bar.update(len(records) + dropped)
            if len(records) + dropped < turns:
                yield conversation

    def _read(self, number: int, source: str, line: int | None, entry: Any) -> Conversation:
        messages = read_messages(entry)
        if len(messages) > 2 * MAX_TURNS:
            raise InvalidRow("too many turns", f"{len(messages)} messages; {MAX_TURNS} turns are the most")
        name = row_name(source, entry, messages)
        if (key := hash_64(name)) in self._names:
            if name == entry.get("id"):
                raise InvalidRow("duplicate id", f"{name}: ids must differ; data_prep.prompts writes unique ids")
            raise InvalidRow("duplicate", "the same conversation came before, and neither has an id")
        self._names.add(key)
        origin = entry["source"] if isinstance(entry.get("source"), str) else source
        return Conversation(number, name, origin, source, line, messages)

    def _earlier(self, number: int) -> tuple[list[dict[str, Any]], int]:
        """The records that row ``number`` has already, in order, and how many of its turns were dropped."""
        where, db = "WHERE place >= ? AND place < ?", self._ledger.db
        span = (number * MAX_TURNS, (number + 1) * MAX_TURNS)
        lines = db.execute(f"SELECT line FROM kept {where} ORDER BY place", span).fetchall()
        (dropped,) = db.execute(f"SELECT COUNT(*) FROM dropped {where}", span).fetchone()
        return [orjson.loads(line) for (line,) in lines], dropped


@dataclass(frozen=True)
class TurnResult:
    """What became of one turn: a record, or the reason for which there is none."""

    conversation: Conversation
    turn: int
    outcome: dict[str, Any] | InvalidRow

    def write(self, ledger: Ledger) -> None:
        """Keep the record, or drop the turn."""
        row, outcome = self.conversation, self.outcome
        place = row.number * MAX_TURNS + self.turn
        if isinstance(outcome, InvalidRow):
            ledger.drop(row.file, row.line, outcome.reason, outcome.detail, place=place, id=row.name, turn=self.turn)
        else:
            ledger.keep(to_line(outcome), place=place)


@dataclass(frozen=True)
class ResponseGenerator:
    """Generates the responses of conversations; any number of threads may call it."""

    tokenizer: PreTrainedTokenizerBase
    settings: GenerationSettings
    target: str  # its fingerprint, for the records
    servers: ServerPool
    _encoding: threading.Lock = field(default_factory=threading.Lock)  # a tokenizer is not made for several threads

    def responses(self, conversation: Conversation) -> Iterator[list[TurnResult]]:
        """The turns that have no response yet, in order; one that gets none comes together with all after it."""
        records = list(conversation.records)
        turns = len(conversation.user_places)
        for turn in range(len(records), turns):
            try:
                records.append(self._record(conversation, records))
            except InvalidRow as error:
                after = InvalidRow("an earlier turn has no response", f"turn {turn}: {error.reason}")
                lost = [TurnResult(conversation, later, after) for later in range(turn + 1, turns)]
                yield [TurnResult(conversation, turn, error), *lost]
                return
            yield [TurnResult(conversation, turn, records[-1])]

    def _record(self, conversation: Conversation, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The record of the turn after those of ``records``; an InvalidRow if there is none."""
        with errors_as_invalid_row():
            prompt = self._prompt(conversation, records)
        name = f"{conversation.name}.{len(records)}"
        completion = self._generate(name, prompt)
        ids = completion.output_ids
        if len(ids) < MIN_OUTPUT_TOKENS:
            raise InvalidRow(f"fewer than {MIN_OUTPUT_TOKENS} generated tokens", f"{len(ids)}")
        with errors_as_invalid_row(), self._encoding:
            if not response_text(self.tokenizer, ids).strip():
                raise InvalidRow("empty response", f"{len(ids)} tokens of white space")
        return {
            "id": name,
            "conversation": conversation.name,
            "turn": len(records),
            "source": conversation.source,
            "prompt_ids": prompt,
            "output_ids": ids,
            "finish": completion.finish,
            "target": self.target,
        }

    def _prompt(self, conversation: Conversation, records: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids up to the next user turn, with the target's responses where the data set's own were."""
        users = conversation.user_places
        history = conversation.messages[: users[len(records)] + 1]
        with self._encoding:
            if records:
                last = records[-1]
                if unfinished_reasoning(self.tokenizer, last["prompt_ids"], last["output_ids"]):
                    raise InvalidRow("the earlier response was cut off while thinking", "give more --max-new-tokens")
            for user, record in zip(users, records, strict=False):
                text = response_text(self.tokenizer, record["output_ids"])
                history[user + 1] = {"role": "assistant", "content": text}
            prompt = prompt_ids(self.tokenizer, history, enable_thinking=THINKING[self.settings.thinking])
        length, most = len(prompt) + self.settings.max_new_tokens, self.settings.max_length
        if length > most:
            raise InvalidRow("prompt and new tokens exceed the maximum length", f"{length} > {most}")
        return prompt

    def _generate(self, name: str, prompt: list[int]) -> Completion:
        settings = self.settings
        options: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "stop_token_ids": [self.tokenizer.eos_token_id],
        }
        if settings.seed is not None:
            options["seed"] = hash_64(f"{settings.seed} {name}") % SEEDS
        return self.servers.generate(prompt, **options)


def generate_all(
    conversations: Iterator[Conversation], generator: ResponseGenerator, ledger: Ledger, in_flight: int
) -> Iterator[TurnResult]:
    """Generate in ``in_flight`` threads; turns are committed before they are yielded, or their error raised."""
    tasks: queue.SimpleQueue[Conversation | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[list[TurnResult] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        while (conversation := tasks.get()) is not None:
            try:
                for part in generator.responses(conversation):
                    results.put(part)
                results.put(None)  # the conversation is done with
            except BaseException as error:  # the main thread raises it
                results.put(error)

    # Daemons: whoever is interrupted does not wait for responses under way.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    under_way = 0
    try:
        while True:
            for conversation in islice(conversations, 2 * in_flight - under_way):
                tasks.put(conversation)
                under_way += 1
            if not under_way:
                return
            parts = [results.get()]
            while not results.empty():
                parts.append(results.get())
            turns = [turn for part in parts if isinstance(part, list) for turn in part]
            for turn in turns:
                turn.write(ledger)
            ledger.commit()
            if failure := next((part for part in parts if isinstance(part, BaseException)), None):
                raise failure
            under_way -= parts.count(None)
            yield from turns
    finally:
        for _ in threads:
            tasks.put(None)
