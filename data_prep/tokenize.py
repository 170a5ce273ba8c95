"""Training samples of responses, exactly as served, with a loss mask over exactly what the target wrote.

    python -m data_prep.tokenize --input data/responses.jsonl --output data/samples.jsonl --target DIR ...

The input is what data_prep.regenerate writes; with --use-dataset-responses also chats whose responses the data set
has, which go through the target's chat template. Each line of the output is one response::

    {"id", "input_ids": [S], "loss_mask": [S], "source", "prompt_tokens", "finish", "origin"}

"origin" is the fingerprint of the target that wrote it, or "dataset". A response that the maximum length cuts is kept
with "cut", the number of its tokens that are missing, and "finish": "length". The summary counts those, and counts
responses as rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import model_validator

from data_prep.pipeline.command import JobOptions, load_target, run_job
from data_prep.pipeline.row_stream import RowStream
from data_prep.pipeline.worker_pool import WorkerPool, cores
from data_prep.readers.inputs import open_inputs
from data_prep.samples.builder import MIN_SUPERVISED, SampleLine, SampleSettings, Target, prepare_building
from specforge_dspine.modeling.vocabulary import resolve_mask_token
from specforge_dspine.utils.chat_template import SHORT, THINKING, check_template, tokenizer_identity
from specforge_dspine.utils.cli import Command, option, run_command
from specforge_dspine.utils.files import model_fingerprint
from specforge_dspine.utils.ledger import Ledger

FORMAT_VERSION = 1  # raise it with any change that gives other samples for the same inputs


class TokenizeOptions(SampleSettings, JobOptions):
    """Options of the command."""

    target: Path = option("directory of the target", metavar="DIR")
    workers: int = option("processes; default: one per core", default=cores(), ge=1, metavar="N")

    @model_validator(mode="after")
    def _thinking_needs_rendering(self) -> TokenizeOptions:
        if self.thinking is not None and not self.use_dataset_responses:
            raise ValueError("--thinking is for --use-dataset-responses: the target's own were sent as they are")
        return self


def tokenize(options: TokenizeOptions) -> str:
    """Write a sample of every response; returns a sentence about the result."""
    config, tokenizer = load_target(options.target)
    if options.use_dataset_responses:
        check_template(tokenizer, THINKING[options.thinking or "none"])
    try:
        mask_token_id = resolve_mask_token(tokenizer, config.vocab_size, options.mask_token_id)
    except ValueError as error:
        raise ValueError(f"{error} Here it is the option --mask-token-id") from error
    max_length = options.max_length or config.max_position_embeddings
    if max_length <= MIN_SUPERVISED:
        raise ValueError(f"--max-length {max_length}: leaves no room for a prompt and a response")
    resolved = {"max_length": max_length, "mask_token_id": mask_token_id}
    settings = SampleSettings(**options.model_dump(include=set(SampleSettings.model_fields)) | resolved)
    target = Target(options.target, model_fingerprint(options.target)[:SHORT], config.vocab_size)
    inputs = open_inputs(options.input, limited=options.limit is not None)
    depends = {
        **settings.model_dump(),
        "fingerprint": target.fingerprint,
        "vocab_size": target.vocab_size,
        **tokenizer_identity(target.path, tokenizer),
        "format_version": FORMAT_VERSION,
    }

    def work(ledger: Ledger) -> Mapping[str, Any]:
        taken, cut = ledger.counts()[0], ledger.fact("cut") or 0
        with WorkerPool(options.workers, prepare_building, settings, target) as pool:
            rows = RowStream(inputs, pool, ledger)
            for source, results in rows:
                for at, (line, result) in enumerate(results):
                    if taken == options.limit:
                        rows.unread(len(results) - at)
                        break
                    if isinstance(result, SampleLine):
                        ledger.keep(result.text)
                        taken, cut = taken + 1, cut + result.was_cut
                    else:
                        ledger.drop(source, line, result.reason, result.detail)
                ledger.set_fact("cut", cut)
                if taken == options.limit:
                    break
        if not taken:
            raise ValueError(f"not one sample in {rows.rows_in} rows: {ledger.reasons()}")
        return {"rows_in": rows.rows_in, "cut_by_max_length": cut}

    return run_job("tokenize", options, inputs, depends, work)


main = partial(run_command, Command(TokenizeOptions, tokenize), module="data_prep.tokenize", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
