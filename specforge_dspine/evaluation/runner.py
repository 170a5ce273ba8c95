"""Answers every prompt of the evaluation sets by speculative decoding, and keeps each answer's rounds.

``TargetVerifier`` opens the model or the server that verifies, on first use. ``EvaluationRunner`` goes
through temperatures, sets, prompts and turns; what its ledger holds already is not decoded again. Draws depend on the
seed and the prompt alone, so that a continued run gives what an undisturbed one would have given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from specforge_dspine.decoding.drafter import BlockDrafter, ReplayDrafter
from specforge_dspine.decoding.loop import Drafter, Target, Trace, decode
from specforge_dspine.decoding.sampling import Sampling
from specforge_dspine.decoding.target_backends import (
    CapturedAnswer,
    ModelTarget,
    ServedTarget,
    answer_span,
    check_greedy,
)
from specforge_dspine.evaluation.benchmarks import EvaluationSet, Prompt
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import TargetIdentity, read_record
from specforge_dspine.utils.chat_template import Message, prompt_ids, response_text, unfinished_reasoning
from specforge_dspine.utils.files import to_line
from specforge_dspine.utils.ledger import Ledger

PROBE_TOKENS = 8  # a server's proof needs a few

Record = dict[str, Any]
"""What is kept of one answer, as JSON."""


class ReplayMismatchError(RuntimeError):
    """Real decoding and the replay of a captured answer disagree: one of the two is wrong."""


@dataclass(frozen=True)
class Settings:
    """How answers are decoded. ``thinking`` None leaves the template's default; ``live`` captured answers of each set
    are decoded for real as well.

    Raises:
        ValueError: a value out of its range, by name.
    """

    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    seed: int = 0
    thinking: bool | None = None
    live: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("max_new_tokens", self.max_new_tokens, 2), ("live", self.live, 0)):
            if value < least:
                raise ValueError(f"{name} = {value}: at least {least}")
        for temperature in self.temperatures:
            self.sampling(temperature)

    def sampling(self, temperature: float) -> Sampling:
        """How both choose at ``temperature``."""
        return Sampling(temperature, self.top_p, self.top_k)

    def to_json(self) -> dict[str, Any]:
        """As files hold it."""
        return asdict(self)


class TargetVerifier:
    """The target of an evaluation: its tables ``head`` E [V, H] and ``embedding`` [V, H] at once, what verifies on
    first use; leaving the context closes that."""

    def __init__(self, identity: TargetIdentity, device: torch.device, server: str | None) -> None:
        self.identity, self.device, self.server = identity, device, server
        self.dtype: torch.dtype = getattr(torch, identity.dtype)
        tables = TargetEmbeddingsAndHead.from_pretrained(identity.model_path, device=device, dtype=self.dtype)
        self.head: Tensor = tables.lm_head.weight
        self.embedding: Tensor = tables.embed_tokens.weight
        self._live: Target | None = None
        self._stack = ExitStack()

    def __enter__(self) -> TargetVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def live(self, probe: list[int]) -> Target:
        """The real target; a server is proven on the ids ``probe`` first.

        Raises:
            CaptureVerificationError: the server's states cannot be trusted.
            ConnectionError: no server there.
        """
        if self._live is None and self.server is None:
            model: Any = AutoModelForCausalLM.from_pretrained(self.identity.model_path, dtype=self.dtype)
            self._live = ModelTarget(model.to(self.device), self.identity.layers)
        elif self._live is None:
            client = self._stack.enter_context(SGLangClient(str(self.server)))
            client.verify_server(self.identity, self.head, (probe * PROBE_TOKENS)[: max(PROBE_TOKENS, len(probe))])
            self._live = ServedTarget(client, self.identity, self.head)
        return self._live


class EvaluationRunner:
    """Decodes with ``drafter`` against ``target``; ``stop`` ids end an answer, ``room`` tokens fit the target.

    Every turn gets one record: set, prompt, turn, temperature, seconds, and ``trace``, or ``skipped`` with a reason.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
        target: TargetVerifier,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        ledger: Ledger,
        *,
        stop: Collection[int],
        room: int,
    ) -> None:
        self.drafter, self.target, self.tokenizer = drafter, target, tokenizer
        self.settings, self.ledger, self.stop, self.room = settings, ledger, stop, room
        self.records = {record_key(record): record for record in ledger.kept()}

    def run(self, sets: Sequence[EvaluationSet]) -> int:
        """Decode what the ledger lacks and keep it there, one by one; returns how many records it then holds.

        Raises:
            ReplayMismatchError: a captured answer's replay differs from real decoding.
            CaptureVerificationError, ConnectionError: as ``TargetVerifier.live``.
            RecordError: a captured record, or a server's, is damaged.
            ValueError: a captured answer is not the target's greedy one.
        """
        jobs = list(self._jobs(sets))
        tokens = rounds = 0
        with tqdm(jobs, desc="answers", unit=" answer", smoothing=0) as bar:
            for temperature, each, prompt, turn, index in bar:
                key = record_key({"set": each.name, "prompt": prompt.name, "turn": turn, "temperature": temperature})
                if key not in self.records:
                    self.records[key] = self._record(temperature, each, prompt, turn, index)
                    self.ledger.keep(to_line(self.records[key]))
                    self.ledger.commit()
                record = self.records[key]
                if "trace" in record:
                    trace = Trace.from_json(record["trace"])
                    tokens, rounds = tokens + trace.tokens, rounds + len(trace.rounds)
                    bar.set_postfix_str(f"τ {tokens / max(rounds, 1):.3f}", refresh=False)
        return len(self.records)

    def _jobs(self, sets: Sequence[EvaluationSet]) -> Iterator[tuple[float, EvaluationSet, Prompt, int, int]]:
        """Temperature, set, prompt, turn, and the prompt's place in its set."""
        for temperature in self.settings.temperatures:
            for each in sets:
                for index, prompt in enumerate(each.prompts):
                    for turn in range(max(1, len(prompt.turns))):
                        yield temperature, each, prompt, turn, index

    def _record(self, temperature: float, each: EvaluationSet, prompt: Prompt, turn: int, index: int) -> Record:
        record: Record = {"set": each.name, "prompt": prompt.name, "turn": turn, "temperature": temperature}
        started = time.monotonic()
        if prompt.record is not None:
            found = self._captured(temperature, prompt, index < self.settings.live)
        else:
            found = self._asked(temperature, each, prompt, turn)
        return record | found | {"seconds": round(time.monotonic() - started, 3)}

    def _captured(self, temperature: float, prompt: Prompt, live: bool) -> Record:
        """The rounds over a record's prompt: replayed where they are greedy."""
        assert prompt.record is not None
        record = {name: tensor.to(self.target.device) for name, tensor in read_record(prompt.record).items()}
        start, end = answer_span(record["loss_mask"], str(prompt.record))
        ids, question = record["input_ids"][:end], record["input_ids"][:start].tolist()
        if temperature:
            if too_long := self._too_long(question):
                return {"skipped": too_long}
            found = self._decode(self.target.live(question), temperature, prompt.name, question, 0)
            return {"trace": found.to_json()}
        check_greedy(
            record["target_last_hidden_states"][0, start - 1 : end - 1],
            self.target.head,
            ids[start:],
            str(prompt.record),
        )
        length = min(end - start, self.settings.max_new_tokens)
        ids, taps = ids[: start + length], record["hidden_states"][0, : start + length]
        known = CapturedAnswer(ids, taps, len(self.target.head))
        trace = self._decode(
            known, 0.0, prompt.name, question, 0, length, ReplayDrafter(self.drafter, ids, taps, start)
        )
        if live:
            real = self._decode(self.target.live(question), 0.0, prompt.name, question, 0, length)
            if real != trace:
                raise ReplayMismatchError(f"{prompt.name}: decoding gave {real}, the captured answer gives {trace}")
        return {"trace": trace.to_json(), "live": live}

    def _too_long(self, question: list[int]) -> str | None:
        """Why there is no room for an answer, if there is none."""
        needed = len(question) + self.settings.max_new_tokens + self.drafter.proposals
        if needed <= self.room:
            return None
        return f"prompt and answer may take {needed} tokens, the target has room for {self.room}"

    def _asked(self, temperature: float, each: EvaluationSet, prompt: Prompt, turn: int) -> Record:
        """The rounds over the answer to a turn of a conversation, or why there are none."""
        history: list[Message] = []
        if prompt.system is not None:
            history.append({"role": "system", "content": prompt.system})
        for earlier in range(turn):
            key = {"set": each.name, "prompt": prompt.name, "turn": earlier, "temperature": temperature}
            record = self.records[record_key(key)]
            if "skipped" in record:
                return {"skipped": "an earlier turn was skipped"}
            answer = Trace.from_json(record["trace"]).answer
            history.append({"role": "user", "content": prompt.turns[earlier]})
            asked = prompt_ids(self.tokenizer, history, enable_thinking=self.settings.thinking)
            if unfinished_reasoning(self.tokenizer, asked, answer):
                return {"skipped": "an earlier answer was cut off while thinking"}
            history.append({"role": "assistant", "content": response_text(self.tokenizer, answer)})
        history.append({"role": "user", "content": prompt.turns[turn]})
        question = prompt_ids(self.tokenizer, history, enable_thinking=self.settings.thinking)
        if too_long := self._too_long(question):
            return {"skipped": too_long}
        trace = self._decode(self.target.live(question), temperature, prompt.name, question, turn)
        return {"trace": trace.to_json()}

    def _decode(
        self,
        target: Target,
        temperature: float,
        name: str,
        question: list[int],
        turn: int,
        length: int | None = None,
        drafter: Drafter | None = None,
    ) -> Trace:
        seed = hashlib.sha256(f"{self.settings.seed} {temperature} {name} {turn}".encode()).digest()
        return decode(
            drafter or self.drafter,
            target,
            question,
            max_new_tokens=length or self.settings.max_new_tokens,
            stop=self.stop,
            sampling=self.settings.sampling(temperature),
            generator=torch.Generator(self.target.device).manual_seed(int.from_bytes(seed[:7], "big")),
            name=name,
        )


def record_key(record: Record) -> tuple[str, int]:
    """Where a record belongs."""
    return f"{record['temperature']:g} {record['set']} {record['prompt']}", record["turn"]
