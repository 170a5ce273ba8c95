"""Shows what training will see: samples with the mask in color, histograms, and warnings about anything odd.

    python -m data_prep.inspect --input data/samples.jsonl --output data/samples.html --target DIR [--show 5]

prints to the terminal and writes the same as an HTML page. OUTPUT.summary.json holds the figures,
OUTPUT.dropped.jsonl every line that is no sample. Supervised tokens are green in the terminal, others dim. Anchors
are positions where a block can begin: a supervised token with a supervised one behind it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from data_prep.pipeline.command import open_ledger, parser, perform
from data_prep.pipeline.rows import guarded
from data_prep.readers.inputs import open_inputs, rows_of
from data_prep.samples.page import Shown, html_page, spans, terminal_text
from data_prep.samples.statistics import Findings, Known, read_sample
from specforge_dspine.utils.chat_template import SHORT, end_ids, tokenizer_identity
from specforge_dspine.utils.cli import run
from specforge_dspine.utils.files import printable
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.invalid_row import InvalidRow
from specforge_dspine.utils.ledger import Ledger


def inspect(options: argparse.Namespace) -> str:
    """Does what the command line says; returns a sentence about the result.

    Raises:
        ValueError: bad options or inputs, an output of another job, or not one sample.
    """
    if not options.target.is_dir():
        raise ValueError(f"--target {options.target}: no such directory")
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    rows = AutoConfig.from_pretrained(options.target).get_text_config().vocab_size
    fingerprint = model_fingerprint(options.target)[:SHORT]
    known = Known.of(tokenizer, rows, end_ids(options.target, tokenizer), options.mask_token_id, fingerprint)
    inputs = open_inputs(options.input, limited=options.limit is not None)
    depends = {
        "show": options.show,
        "mask_token_id": options.mask_token_id,
        "target": fingerprint,
        **tokenizer_identity(options.target, tokenizer),
    }

    def work(ledger: Ledger) -> Mapping[str, Any]:
        findings = Findings(known)
        shown: list[Shown] = []
        bad = 0
        rows = islice(rows_of(inputs), options.limit)
        for source, line, entry in tqdm(rows, desc="samples", unit=" rows", disable=None):
            try:
                with guarded():
                    sample = read_sample(f"{source}, line {line}", entry)
                    if findings.samples < options.show:
                        shown.append(Shown(sample, list(spans(sample, tokenizer, known.rows))))
                    findings.add(sample)
            except InvalidRow as odd:
                ledger.drop(source, line, odd.reason, odd.detail)
                bad += 1
        if not findings.samples:
            raise ValueError(f"not one sample in {bad} rows: {ledger.reasons()}")
        print(terminal_text(findings, shown, color=options.color or sys.stdout.isatty()))
        ledger.keep(html_page(findings, shown, title=" ".join(map(printable, options.input))).encode())
        return {"rows_in": findings.samples + bad, "rows_kept": findings.samples, **findings.summary()}

    ledger = open_ledger("inspect", options, inputs, depends)
    ledger.overwrite |= ledger.is_own()  # to look again is what the command is for
    return perform(ledger, work, inputs.ignored)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    made = parser("inspect", __doc__)
    made.add_argument("--target", type=Path, required=True, metavar="DIR", help="directory of the target")
    made.add_argument("--show", type=int, default=5, metavar="N", help="samples to show (default 5)")
    made.add_argument("--mask-token-id", type=int, metavar="ID", help="warn where it occurs")
    made.add_argument("--colour", action="store_true", help="even where the output is no terminal")
    run(made, inspect, arguments)


if __name__ == "__main__":
    main()
