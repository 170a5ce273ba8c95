"""The target's own responses to every prompt, from running servers or one that is started for it.

    python -m data_prep.regenerate --input data/train.jsonl --output data/responses.jsonl --target DIR \\
        (--server URL ... | --managed cpu|0|0,1) [--max-new-tokens 64] [--thinking on|off|none] ...

The input is what data_prep.prompts writes, or any chats that it reads. Each line of the output is the response to one
user turn: the ids that were sent, the ids that came back, and whether it ended by itself ("stop") or at the limit
("length"). Counted as rows are responses. The same command continues a killed run and asks nothing twice. A finished
run is left as it is, and one with other inputs is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import model_validator
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from data_prep.generation.responses import Conversations, GenerationSettings, ResponseGenerator, generate_all
from data_prep.generation.server_pool import Requirements, ServerPool, check_server
from data_prep.pipeline.command import JobOptions, load_target, run_job
from data_prep.readers.inputs import open_inputs
from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.utils.chat_template import SHORT, THINKING, check_template, tokenizer_identity
from specforge_dspine.utils.cli import Command, option, parse_ids, run_command
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import model_fingerprint
from specforge_dspine.utils.ledger import Ledger

FORMAT_VERSION = 1  # raise it with any change that gives other responses for the same inputs
CPU_CACHE_TOKENS = 32768  # KV cache of a CPU server; when it is full, further requests wait
SECONDS_PER_TOKEN = 10.0  # after this long for each new token, a request counts as lost


class RegenerateOptions(GenerationSettings, JobOptions):
    """Options of the command."""

    target: Path = option("directory of the target", metavar="DIR")
    server: tuple[str, ...] = option("running SGLang servers of the target", default=(), metavar="URL")
    managed: str | None = option(
        "start one, on the CPU or on these GPUs", default=None, metavar="cpu|0|0,1", pattern=r"^(cpu|\d+(,\d+)*)$"
    )
    served_as: str | None = option("the target's path there, if it is another one", default=None, metavar="NAME")
    in_flight: int = option("requests at a time", default=64, ge=1, metavar="N")
    patience: float = option("seconds to wait for lost servers", default=300.0, ge=0, metavar="S")

    @model_validator(mode="after")
    def _fits_together(self) -> RegenerateOptions:
        if bool(self.server) == bool(self.managed):
            raise ValueError("give exactly one of --server and --managed")
        if self.served_as and self.managed:
            raise ValueError("--served-as is for --server: a server that is started here serves --target by its path")
        if self.seed is not None and not self.temperature:
            raise ValueError(f"--seed {self.seed}: greedy responses (temperature 0) draw nothing, so leave it out")
        if self.seed is not None and self.managed == "cpu":
            raise ValueError("--seed: SGLang heeds seeds on GPUs only; leave it out, and draws differ by run")
        return self


def regenerate(options: RegenerateOptions) -> str:
    """Generate a response to every user turn; returns a sentence about the result."""
    config, tokenizer = load_target(options.target)
    check_template(tokenizer, THINKING[options.thinking])
    if tokenizer.eos_token_id is None:
        raise ValueError("the target's tokenizer has no eos token; set eos_token in tokenizer_config.json")
    length = options.max_length or config.max_position_embeddings
    if length <= options.max_new_tokens:
        raise ValueError(f"--max-length {length}: leaves no room beside --max-new-tokens {options.max_new_tokens}")
    required = Requirements(options.served_as or str(options.target), options.dtype, options.seed is not None)
    required = replace(required, dtype=_dtype(options, config, required))
    settings = GenerationSettings(**options.model_dump(include=set(GenerationSettings.model_fields)))
    settings = settings.model_copy(update={"max_length": length, "dtype": required.dtype})
    inputs = open_inputs(options.input, limited=options.limit is not None)
    depends = job_inputs(options.target, tokenizer, settings)

    def work(ledger: Ledger) -> Mapping[str, Any]:
        conversations = Conversations(inputs, ledger, options.limit)
        with tqdm(desc="responses", unit=" turns", disable=None) as bar:
            unanswered = conversations.unanswered(bar)
            first = next(unanswered, None)  # without anything to do no server is needed
            if first is not None:
                with _servers(options, length, required) as servers:
                    generator = ResponseGenerator(tokenizer, settings, depends["target"][:SHORT], servers)
                    started, tokens = time.monotonic(), 0
                    for turn in generate_all(chain([first], unanswered), generator, ledger, options.in_flight):
                        tokens += 0 if isinstance(turn.outcome, InvalidRow) else len(turn.outcome["output_ids"])
                        bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s", refresh=False)
                        bar.update()
        tokens = cut = 0
        for record in ledger.kept():
            tokens += len(record["output_ids"])
            cut += record["finish"] == "length"
        if not tokens:
            raise ValueError(f"not one response to {conversations.rows_in} turns: {ledger.reasons()}")
        return {"rows_in": conversations.rows_in, "generated_tokens": tokens, "cut_by_the_limit": cut}

    return run_job("regenerate", options, inputs, depends, work)


def job_inputs(target: Path, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings) -> dict[str, Any]:
    """Everything beside the prompts that the responses depend on, as JSON values."""
    identity = {"target": model_fingerprint(target), **tokenizer_identity(target, tokenizer)}
    return {**identity, **settings.model_dump(), "format_version": FORMAT_VERSION}


def _dtype(options: RegenerateOptions, config: PretrainedConfig, required: Requirements) -> str:
    """The dtype of the responses: running servers' own, otherwise the one asked for."""
    if options.dtype:  # a finished job needs no server to be recognized
        return options.dtype
    if options.managed:
        if config.dtype is None:
            raise ValueError(f"--dtype: {options.target}/config.json names no dtype, so give one")
        return str(config.dtype).removeprefix("torch.")
    dtypes = {check_server(url, required) for url in options.server}
    if len(dtypes) > 1:
        raise ValueError(f"--server: the servers compute in {' and '.join(sorted(dtypes))}; responses would differ")
    return dtypes.pop()


@contextmanager
def _servers(options: RegenerateOptions, max_length: int, required: Requirements) -> Iterator[ServerPool]:
    """The servers to send to; one of our own lives as long as the context."""
    timeout_s = 600.0 + SECONDS_PER_TOKEN * options.max_new_tokens
    if options.managed is None:
        for url in options.server:
            check_server(url, required)
        yield ServerPool(options.server, required, timeout_s, options.patience)
        return
    devices = [] if options.managed == "cpu" else list(parse_ids(options.managed))
    with ManagedServer(
        str(options.target),
        options.output.with_name(options.output.name + ".server"),
        layers=[0],  # nothing is captured here, but the server's plugin wants to know what it could
        dtype=str(required.dtype),
        devices=devices,
        max_running_requests=options.in_flight,
        max_total_tokens=None if devices else min(options.in_flight * max_length, CPU_CACHE_TOKENS),
        extra_args=["--enable-deterministic-inference"] if required.deterministic else [],
    ) as server:
        yield ServerPool([server.url], required, timeout_s, options.patience)


main = partial(run_command, Command(RegenerateOptions, regenerate), module="data_prep.regenerate", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
