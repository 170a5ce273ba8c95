"""A look at what training will see: samples with the mask in color, histograms, and warnings.

    python -m data_prep.inspect --input data/samples.jsonl --output data/samples.html --target DIR [--show 5]

prints to the terminal and writes the same as an HTML page. OUTPUT.summary.json holds the figures,
OUTPUT.dropped.jsonl every line that is no sample. Supervised tokens are green in the terminal, others dim. Anchors
are positions where a block can begin: a supervised token with a supervised one after it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.pipeline.command import JobOptions, load_target, run_job
from data_prep.pipeline.rows import errors_as_invalid_row
from data_prep.readers.inputs import open_inputs, rows_of
from data_prep.samples.page import Line, html_page, sample_lines, statistics_lines, terminal_text
from data_prep.samples.statistics import SampleStatistics, TargetVocabulary, read_sample
from specforge_dspine.utils.chat_template import SHORT, tokenizer_identity
from specforge_dspine.utils.cli import Command, option, run_command
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import model_fingerprint, printable
from specforge_dspine.utils.ledger import Ledger

FORMAT_VERSION = 1  # raise it with any change that gives another page for the same inputs


class InspectOptions(JobOptions):
    """Options of the command."""

    target: Path = option("directory of the target", metavar="DIR")
    show: int = option("samples to show", default=5, ge=0, metavar="N")
    mask_token_id: int | None = option("warn where it occurs", default=None, ge=0, metavar="ID")
    color: bool = option("even where the output is no terminal", default=False)


def inspect(options: InspectOptions) -> str:
    """Show and count the samples; returns a sentence about the result."""
    config, tokenizer = load_target(options.target)
    fingerprint = model_fingerprint(options.target)[:SHORT]
    vocabulary = TargetVocabulary.of(options.target, tokenizer, config.vocab_size, options.mask_token_id)
    inputs = open_inputs(options.input, limited=options.limit is not None)
    depends = {
        "show": options.show,
        "mask_token_id": options.mask_token_id,
        "target": fingerprint,
        **tokenizer_identity(options.target, tokenizer),
        "format_version": FORMAT_VERSION,
    }

    def work(ledger: Ledger) -> Mapping[str, Any]:
        statistics = SampleStatistics(vocabulary, fingerprint)
        lines: list[Line] = []
        dropped = 0
        rows = islice(rows_of(inputs), options.limit)
        for source, line, entry in tqdm(rows, desc="samples", unit=" rows", disable=None):
            try:
                with errors_as_invalid_row():
                    sample = read_sample(f"{source}, line {line}", entry)
                    if statistics.samples < options.show:
                        lines += sample_lines(sample, tokenizer, config.vocab_size)
                    statistics.add(sample)
            except InvalidRow as error:
                ledger.drop(source, line, error.reason, error.detail)
                dropped += 1
        if not statistics.samples:
            raise ValueError(f"not one sample in {dropped} rows: {ledger.reasons()}")
        lines += statistics_lines(statistics)
        print(terminal_text(lines, color=options.color or sys.stdout.isatty()))
        ledger.keep(html_page(lines, title=" ".join(map(printable, options.input))).encode())
        return {"rows_in": statistics.samples + dropped, "rows_kept": statistics.samples, **statistics.summary()}

    # To look again is what the command is for.
    return run_job("inspect", options, inputs, depends, work, replaces_own=True)


main = partial(run_command, Command(InspectOptions, inspect), module="data_prep.inspect", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
