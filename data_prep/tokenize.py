"""Training samples of answers, exactly as served, with a loss mask over exactly what the target wrote.

    python -m data_prep.tokenize --input data/answers.jsonl --output data/samples.jsonl --target DIR [--max-length N]

The input is what data_prep.regenerate writes; with --foreign-answers also chats whose answers come from elsewhere,
which go through the target's chat template. Each line of the output is one answer::

    {"id", "input_ids": [S], "loss_mask": [S], "source", "prompt_tokens", "finish", "origin"}

"origin" is the fingerprint of the target that wrote it, or "elsewhere". An answer that the maximum length cuts is
kept with "cut": the number of its tokens that are missing, and "finish": "length", and is counted in the summary.
Counted as rows are answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from data_prep.pipeline.command import Passage, open_ledger, parser, perform
from data_prep.pipeline.worker_pool import Workers
from data_prep.readers.inputs import open_inputs
from data_prep.samples.builder import MIN_SUPERVISED, Made, Options, prepare
from specforge_dspine.modeling.vocabulary import resolve_mask_token
from specforge_dspine.utils.chat_template import SHORT, THINKING, check_template, tokenizer_identity
from specforge_dspine.utils.cli import run
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.ledger import Ledger
from specforge_dspine.utils.versions import VERSION


def tokenize(options: argparse.Namespace) -> str:
    """Does what the command line says; returns a sentence about the result.

    Raises:
        ValueError: bad options or inputs, an output of another job, or not one sample.
    """
    if not options.target.is_dir():
        raise ValueError(f"--target {options.target}: no such directory (download the target first)")
    config = AutoConfig.from_pretrained(options.target).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    if options.thinking is not None and not options.foreign_answers:
        raise ValueError("--thinking is for --foreign-answers: the target's own were sent as they are")
    thinking = THINKING[options.thinking or "none"]
    if options.foreign_answers:
        check_template(tokenizer, thinking)
    try:
        mask_token_id = resolve_mask_token(tokenizer, config.vocab_size, options.mask_token_id)
    except ValueError as error:
        raise ValueError(f"{error} Here it is the option --mask-token-id") from error
    made = Options(
        target=options.target,
        fingerprint=model_fingerprint(options.target)[:SHORT],
        max_length=options.max_length or config.max_position_embeddings,
        rows=config.vocab_size,
        mask_token_id=mask_token_id,
        thinking=thinking,
        foreign=options.foreign_answers,
    )
    if made.max_length <= MIN_SUPERVISED:
        raise ValueError(f"--max-length {made.max_length}: leaves no room for a prompt and an answer")
    inputs = open_inputs(options.input, limited=options.limit is not None)
    depends = {
        **{name: value for name, value in asdict(made).items() if name != "target"},
        **tokenizer_identity(options.target, tokenizer),
        "version": VERSION,
    }

    def work(ledger: Ledger) -> Mapping[str, Any]:
        taken, cut = ledger.counts()[0], ledger.fact("cut") or 0
        with Workers(options.workers, prepare, made) as workers:
            passage = Passage(inputs, workers, ledger)
            for source, results in passage:
                for at, result in enumerate(results):
                    if taken == options.limit:
                        passage.give_back(len(results) - at)
                        break
                    if isinstance(result, Made):
                        ledger.keep(result.text)
                        taken, cut = taken + 1, cut + result.was_cut
                    else:
                        ledger.drop(source, result.line, result.reason, result.detail)
                ledger.set_fact("cut", cut)
                if taken == options.limit:
                    break
        if not taken:
            raise ValueError(f"not one sample in {passage.rows_in} rows: {ledger.reasons()}")
        return {"rows_in": passage.rows_in, "cut_by_max_length": cut}

    return perform(open_ledger("tokenize", options, inputs, depends), work, inputs.ignored)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    made = parser("tokenize", __doc__, workers=True)
    made.add_argument("--target", type=Path, required=True, metavar="DIR", help="directory of the target")
    made.add_argument("--max-length", type=int, metavar="N", help="of a sample (default: the target's context)")
    made.add_argument("--mask-token-id", type=int, metavar="ID", help="a reserved id (default: as training finds it)")
    made.add_argument("--foreign-answers", action="store_true", help="take chats whose answers come from elsewhere")
    made.add_argument("--thinking", choices=sorted(THINKING), help="the template's switch, for these (default none)")
    run(made, tokenize, arguments)


if __name__ == "__main__":
    main()
