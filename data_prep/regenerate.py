"""The target's own answers to every prompt, from running servers or one that is started for it.

    python -m data_prep.regenerate --input data/train.jsonl --output data/answers.jsonl --target DIR \\
        (--server URL ... | --managed cpu|0|0,1) [--max-new-tokens 64] [--thinking on|off|none] ...

The input is what data_prep.prompts writes, or any chats that it reads. Each line of the output is the answer to one
user turn: the ids that were sent, the ids that came back, and whether it ended by itself ("stop") or at the limit
("length"). Counted as rows are answers. A killed run is continued by the same command and asks nothing twice, a
finished one is left as it is, and one with other inputs is refused.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from data_prep.cleaning.conversations import read_messages, user_turns
from data_prep.cleaning.exact_dedup import SeenKeys
from data_prep.generation.server_pool import Expected, Servers, served
from data_prep.generation.turns import MAX_TURNS, Asked, Settings, Turns, answer_all, earlier_answers
from data_prep.pipeline.command import open_ledger, parser, perform
from data_prep.pipeline.rows import guarded, key_of, row_name
from data_prep.readers.inputs import Inputs, open_inputs, rows_of
from specforge_dspine.streaming.server import ManagedServer, ManagedServerError, parse_ids
from specforge_dspine.utils.chat_template import SHORT, THINKING, check_template, tokenizer_identity
from specforge_dspine.utils.cli import positive, run
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.invalid_row import InvalidRow
from specforge_dspine.utils.ledger import Ledger

CPU_CACHE_TOKENS = 32768
"""KV cache of a CPU server; when it is full, further requests wait."""

SECONDS_PER_TOKEN = 10.0
"""After this long for each new token, a request counts as lost."""


class Rows:
    """The conversations of ``inputs``, told apart by id; rows that are none are dropped on the way.

    Attributes:
        rows_in: answers wanted so far, and rows that are no conversation.
    """

    def __init__(self, inputs: Inputs, ledger: Ledger, limit: int | None) -> None:
        self._inputs = inputs
        self._ledger = ledger
        self._limit = limit
        self._names = SeenKeys()
        self.rows_in = 0

    def missing(self, bar: tqdm[Any]) -> Iterator[Asked]:
        """Conversations with turns that have no answer yet; the others count as done in ``bar``."""
        for number, (source, line, entry) in enumerate(islice(rows_of(self._inputs), self._limit)):
            answered, dropped = earlier_answers(self._ledger, number)
            try:
                with guarded():
                    asked = self._read(number, source, line, entry, answered)
            except InvalidRow as odd:
                self.rows_in += 1
                if not dropped:
                    self._ledger.drop(source, line, odd.reason, odd.detail, place=number * MAX_TURNS)
                continue
            turns = len(asked.user_places)
            self.rows_in += turns
            bar.update(len(answered) + dropped)
            if len(answered) + dropped < turns:
                yield asked

    def _read(self, number: int, source: str, line: int | None, entry: Any, answered: list[dict[str, Any]]) -> Asked:
        messages = read_messages(entry)
        if len(user_turns(messages)) > MAX_TURNS:
            raise InvalidRow("too many turns", f"{len(user_turns(messages))} > {MAX_TURNS}")
        name = row_name(source, entry, messages)
        (known,) = self._names.known([key := key_of(name)])
        if known and name == entry.get("id"):
            raise InvalidRow("duplicate id", f"{name}: ids must differ; data_prep.prompts writes unique ids")
        if known:
            raise InvalidRow("duplicate", "the same conversation came before, and neither has an id")
        self._names.add(key)
        origin = entry.get("source")
        return Asked(number, name, origin if isinstance(origin, str) else source, source, line, messages, answered)


def regenerate(options: argparse.Namespace) -> str:
    """Does what the command line says; returns a sentence about the result.

    Raises:
        ValueError: bad options, files that belong to another job, or a server that serves something else.
        ConnectionError: no server there.
    """
    if options.served_as and options.managed:
        raise ValueError("--served-as is for --server: a server that is started here serves --target under its path")
    if not options.target.is_dir():
        raise ValueError(f"--target {options.target}: no such directory (download the target first)")
    config = AutoConfig.from_pretrained(options.target).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    thinking = THINKING[options.thinking]
    check_template(tokenizer, thinking)
    if tokenizer.eos_token_id is None:
        raise ValueError("the target's tokenizer has no eos token; set eos_token in tokenizer_config.json")
    expected = Expected(options.served_as or str(options.target), options.dtype, options.seed is not None)
    settings = Settings(
        max_length=options.max_length or config.max_position_embeddings,
        dtype=_dtype(options, config, expected),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        thinking=thinking,
        seed=options.seed,
    )
    inputs = open_inputs(options.input, limited=options.limit is not None)
    depends = job_inputs(options.target, tokenizer, settings)

    def work(ledger: Ledger) -> Mapping[str, Any]:
        rows = Rows(inputs, ledger, options.limit)
        facts = {"generated_tokens": 0, "cut_by_the_limit": 0}
        with tqdm(desc="answers", unit=" turns", disable=None) as bar:
            missing = rows.missing(bar)
            first = next(missing, None)  # without anything to do no server is needed
            if first is not None:
                with _servers(options, settings, expected) as servers:
                    turns = Turns(tokenizer, settings, depends["target"][:SHORT], servers)
                    started, tokens = time.monotonic(), 0
                    for answered in answer_all(chain([first], missing), turns, ledger, options.in_flight):
                        tokens += len(answered.record["output_ids"]) if answered.record else 0
                        bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s", refresh=False)
                        bar.update()
        for (line,) in ledger.db.execute("SELECT line FROM kept"):
            record = orjson.loads(line)
            facts["generated_tokens"] += len(record["output_ids"])
            facts["cut_by_the_limit"] += record["finish"] == "length"
        if not ledger.counts()[0]:
            raise ValueError(f"not one answer to {rows.rows_in} turns: {ledger.reasons()}")
        return {"rows_in": rows.rows_in, **facts}

    return perform(open_ledger("regenerate", options, inputs, depends), work, inputs.ignored)


def job_inputs(target: Path, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> dict[str, Any]:
    """Everything beside the prompts that the answers depend on, as JSON values."""
    return {
        "target": model_fingerprint(target),
        **tokenizer_identity(target, tokenizer),
        **asdict(settings),
    }


def _dtype(options: argparse.Namespace, config: PretrainedConfig, expected: Expected) -> str:
    """The dtype that answers: running servers' own, otherwise the one asked for."""
    if options.server is None:
        dtype = options.dtype or str(config.dtype).removeprefix("torch.")
        if dtype == "None":
            raise ValueError(f"--dtype: {options.target}/config.json names no dtype, so give one")
        return dtype
    if options.dtype:  # a finished job needs no server to be recognized
        return options.dtype
    dtypes = {served(url, expected) for url in options.server}
    if len(dtypes) > 1:
        raise ValueError(f"--server: the servers compute in {' and '.join(sorted(dtypes))}; answers would differ")
    return dtypes.pop()


@contextmanager
def _servers(options: argparse.Namespace, settings: Settings, expected: Expected) -> Iterator[Servers]:
    """The servers to send to; one of our own lives as long as the context."""
    timeout_s = 600.0 + SECONDS_PER_TOKEN * settings.max_new_tokens
    if options.server is not None:
        for url in options.server:
            served(url, expected)
        yield Servers(options.server, replace(expected, dtype=settings.dtype), timeout_s, options.patience)
        return
    devices = [] if options.managed == "cpu" else parse_ids(options.managed)
    if settings.seed is not None and not devices:
        raise ValueError("--seed: SGLang heeds seeds on GPUs only; leave it out, and draws differ from run to run")
    try:
        with ManagedServer(
            str(options.target),
            options.output.with_name(options.output.name + ".server"),
            layers=[0],  # nothing is captured here, but the server's plugin wants to know what it could
            dtype=settings.dtype,
            devices=devices,
            max_running_requests=options.in_flight,
            max_total_tokens=None if devices else min(options.in_flight * settings.max_length, CPU_CACHE_TOKENS),
            extra_args=["--enable-deterministic-inference"] if settings.seed is not None else [],
        ) as server:
            yield Servers([server.url], Expected(str(options.target), settings.dtype), timeout_s, options.patience)
    except ManagedServerError as failed:
        raise ValueError(str(failed)) from failed


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    made = parser("regenerate", __doc__)
    made.add_argument("--target", type=Path, required=True, metavar="DIR", help="directory of the target")
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL", nargs="+", help="running SGLang servers of the target")
    where.add_argument("--managed", metavar="cpu|0|0,1", help="start one, on the CPU or on these GPUs")
    made.add_argument("--served-as", metavar="NAME", help="the target's path there, if it is another one")
    made.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the target's")
    made.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    made.add_argument("--max-length", type=int, metavar="N", help="prompt + answer (default: the target's context)")
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    made.add_argument("--seed", type=int, metavar="N", help="of the draws, where the temperature is not 0")
    made.add_argument("--thinking", choices=sorted(THINKING), default="none", help="the template's switch")
    made.add_argument("--in-flight", type=positive, default=64, metavar="N", help="requests at a time (default 64)")
    made.add_argument("--patience", type=float, default=300.0, metavar="S", help="seconds to wait for lost servers")
    run(made, regenerate, arguments)


if __name__ == "__main__":
    main()
