"""Decoding of all prompts of the evaluation sets, with every response's rounds kept in a ledger.

What the ledger holds already is not decoded again. Draws depend on the seed and the prompt alone, so a continued run
gives what an uninterrupted one would have given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.loop import Trace, decode, truncate
from specforge_dspine.decoding.replay import check_greedy, replay, response_span
from specforge_dspine.decoding.sampling import Sampling
from specforge_dspine.evaluation.benchmarks import EvaluationSet, Prompt
from specforge_dspine.evaluation.loading import TargetVerifier
from specforge_dspine.evaluation.options import EvaluateOptions
from specforge_dspine.evaluation.results import Record
from specforge_dspine.streaming.record import read_record
from specforge_dspine.utils.chat_template import THINKING, Message, prompt_ids, response_text, unfinished_reasoning
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import to_line
from specforge_dspine.utils.ledger import Ledger

KEY = ("set", "prompt", "turn", "temperature")
"""Fields that identify a record."""


class ReplayMismatchError(RunError):
    """Decoding and the replay of a captured response disagree: one of the two is wrong."""


class Job(NamedTuple):
    """One response to decode: a ``turn`` of the prompt at ``place`` in a set."""

    temperature: float
    set_name: str
    prompt: Prompt
    turn: int
    place: int

    @property
    def key(self) -> tuple[Any, ...]:
        """The values of ``KEY`` in the response's record."""
        return self.set_name, self.prompt.name, self.turn, self.temperature


@dataclass
class EvaluationRunner:
    """Decodes with ``drafter`` and ``target``; ``stop`` ids end a response, ``max_length`` tokens fit the target.

    Every turn gets one record: set, prompt, turn, temperature, seconds, and ``trace``, or ``skipped`` with a reason.
    """

    drafter: BlockDrafter
    target: TargetVerifier
    tokenizer: PreTrainedTokenizerBase
    options: EvaluateOptions
    ledger: Ledger
    stop: Collection[int]
    max_length: int

    def __post_init__(self) -> None:
        kept = ((tuple(record[name] for name in KEY), record) for record in self.ledger.kept())
        self.records: dict[tuple[Any, ...], Record] = dict(kept)

    def run(self, sets: Sequence[EvaluationSet]) -> int:
        """Decode what the ledger lacks and keep it there, one by one; returns how many records it then holds.

        A ReplayMismatchError or ValueError if the replay of a captured response would be wrong.
        A CaptureVerificationError, ConnectionError or RecordError if a server or a record cannot be used.
        """
        jobs = [
            Job(temperature, each.name, prompt, turn, place)
            for temperature in self.options.temperature
            for each in sets
            for place, prompt in enumerate(each.prompts)
            for turn in range(max(1, len(prompt.turns)))
        ]
        tokens = rounds = 0
        with tqdm(jobs, desc="responses", unit=" response", smoothing=0) as bar:
            for job in bar:
                if job.key not in self.records:
                    self.records[job.key] = self._record(job)
                    self.ledger.keep(to_line(self.records[job.key]))
                    self.ledger.commit()
                if "trace" in self.records[job.key]:
                    trace = Trace.from_json(self.records[job.key]["trace"])
                    tokens, rounds = tokens + trace.tokens, rounds + len(trace.rounds)
                    bar.set_postfix_str(f"τ {tokens / max(rounds, 1):.3f}", refresh=False)
        return len(self.records)

    def _record(self, job: Job) -> Record:
        started = time.monotonic()
        found = self._decode_prompt(job) if job.prompt.record is None else self._decode_captured(job)
        return dict(zip(KEY, job.key, strict=True)) | found | {"seconds": round(time.monotonic() - started, 3)}

    def _decode_captured(self, job: Job) -> Record:
        """The rounds over a record's prompt; replayed where decoding is greedy."""
        path = job.prompt.record
        assert path is not None
        record = {name: tensor.to(self.target.device) for name, tensor in read_record(path).items()}
        start, end = response_span(record["loss_mask"], str(path))
        ids, prompt = record["input_ids"][:end], record["input_ids"][:start].tolist()
        if job.temperature:
            return self._decode_live(job, prompt)
        final = record["target_last_hidden_states"][0, start - 1 : end - 1]
        check_greedy(final, self.target.head, ids[start:], str(path))
        end = start + len(truncate(ids[start:].tolist(), self.stop, self.options.max_new_tokens))
        trace = replay(self.drafter, ids[:end], record["hidden_states"][0, :end], start, job.prompt.name)
        verify_live = job.place < self.options.verify_live
        if verify_live and (live := self._decode(job, prompt, end - start)) != trace:
            raise ReplayMismatchError(f"{job.prompt.name}: decoding gave {live}, the captured response gives {trace}")
        return {"trace": asdict(trace), "live": verify_live}

    def _decode_prompt(self, job: Job) -> Record:
        """The rounds over a turn of a conversation, after the responses to earlier turns."""
        history: list[Message] = []
        if job.prompt.system is not None:
            history.append({"role": "system", "content": job.prompt.system})
        for turn in range(job.turn):
            record = self.records[job._replace(turn=turn).key]
            if "skipped" in record:
                return {"skipped": "an earlier turn was skipped"}
            history.append({"role": "user", "content": job.prompt.turns[turn]})
            trace = Trace.from_json(record["trace"])
            if unfinished_reasoning(self.tokenizer, trace.ids[: trace.prompt], trace.response):
                return {"skipped": "an earlier response was cut off while thinking"}
            history.append({"role": "assistant", "content": response_text(self.tokenizer, trace.response)})
        history.append({"role": "user", "content": job.prompt.turns[job.turn]})
        prompt = prompt_ids(self.tokenizer, history, enable_thinking=THINKING[self.options.thinking])
        return self._decode_live(job, prompt)

    def _decode_live(self, job: Job, prompt: list[int]) -> Record:
        """The rounds over a response that the target verifies, or why there is no room for one."""
        needed = len(prompt) + self.options.max_new_tokens + self.drafter.proposals
        if needed > self.max_length:
            room = f"the target has room for {self.max_length}"
            return {"skipped": f"prompt and response may take {needed} tokens, {room}"}
        return {"trace": asdict(self._decode(job, prompt, self.options.max_new_tokens))}

    def _decode(self, job: Job, prompt: list[int], length: int) -> Trace:
        seed = hashlib.sha256(f"{self.options.seed} {job.temperature} {job.prompt.name} {job.turn}".encode()).digest()
        return decode(
            self.drafter,
            self.target.live(prompt),
            prompt,
            max_new_tokens=length,
            stop=self.stop,
            sampling=Sampling(job.temperature, self.options.top_p, self.options.top_k),
            generator=torch.Generator(self.target.device).manual_seed(int.from_bytes(seed[:7], "big")),
            name=job.prompt.name,
        )
