"""Prompts for training and for held-out evaluation.

    python -m data_prep.prompts --input sharegpt.json chatterbot ORG/NAME --output data/train.jsonl \\
        [--heldout data/heldout.jsonl --heldout-share 0.01] [--near 0.8] [--decontaminate mt-bench human-eval] ...

Each line of the outputs is one conversation, which ends with a user turn::

    {"id": str, "source": str, "line": int, "messages": [{"role": "user", "content": str}, ...]}

Assistant turns are only places: regeneration replaces them with the target's own. A prompt that occurs again, up to
case and white space of its system and user messages, is dropped. Held out are prompts by a hash of their first user
turn, so that no conversation begins alike on both sides, now or with other files. A conversation whose later turns
could begin a held-out one is not trained on. OUTPUT.dropped.jsonl names every dropped row: file, line, reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import model_validator

from data_prep.cleaning.conversations import read_conversation, user_turns
from data_prep.cleaning.filters import Candidate, Rules, prepare_screening
from data_prep.pipeline.command import JobOptions, run_job
from data_prep.pipeline.row_stream import RowStream
from data_prep.pipeline.rows import errors_as_invalid_row
from data_prep.pipeline.worker_pool import WorkerPool, cores
from data_prep.readers.inputs import open_inputs, rows_of
from specforge_dspine.utils.cli import Command, option, run_command
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.ledger import Ledger

FORMAT_VERSION = 1  # raise it with any change that gives other prompts for the same inputs
TRAIN, HELDOUT = 0, 1  # numbers of the two outputs


class PromptOptions(Rules, JobOptions):
    """Options of the command."""

    workers: int = option("processes; default: one per core", default=cores(), ge=1, metavar="N")
    heldout: Path | None = option("file for held-out prompts (default: none are)", default=None, metavar="FILE")
    heldout_limit: int | None = option("held-out prompts at most", default=None, ge=1, metavar="N")
    interleave: bool = option("take a row of each input in turn, not one input after the other", default=False)
    decontaminate: tuple[str, ...] = option("evaluation sets", default=(), metavar="FILE|NAME")

    @model_validator(mode="after")
    def _heldout_has_a_file(self) -> PromptOptions:
        if self.heldout is None and self.model_fields_set & {"heldout_share", "heldout_limit"}:
            raise ValueError("--heldout-share and --heldout-limit: name with --heldout where held-out prompts go")
        return self


class PromptSelector:
    """Takes rows in their order, and drops what is there already or no longer wanted.

    ``near``: the similarity of near duplicates, None to leave them. ``limits``: rows of each output, None for all.
    """

    def __init__(self, ledger: Ledger, near: float | None, limits: Sequence[int | None]) -> None:
        self._ledger = ledger
        self._limits = limits
        self._taken = ledger.kept_by_output()
        self._near = None
        if near is not None:
            from data_prep.cleaning.near_dedup import NearIndex

            self._near = NearIndex(ledger.db, near)

    @property
    def is_full(self) -> bool:
        """Whether there are as many training prompts as wanted, and held-out ones if their number was given."""
        pairs = zip(self._taken, self._limits, strict=True)
        return self._limits[TRAIN] is not None and all(limit is None or taken >= limit for taken, limit in pairs)

    def take(self, source: str, rows: Sequence[tuple[int | None, Candidate | InvalidRow]]) -> int:
        """Keep or drop rows until the outputs are full; returns how many were left untouched."""
        for at, (line, row) in enumerate(rows):
            if self.is_full:
                return len(rows) - at
            try:
                if isinstance(row, InvalidRow):
                    raise row
                self._take(f"{source}, line {line}", row)
            except InvalidRow as error:
                self._ledger.drop(source, line, error.reason, error.detail)
        return 0

    def _take(self, place: str, row: Candidate) -> None:
        output = HELDOUT if row.heldout else TRAIN
        limit = self._limits[output]
        if self._ledger.has_key(row.key):
            raise InvalidRow("duplicate", "the same prompt came before")
        if limit is not None and self._taken[output] >= limit:
            raise InvalidRow("beyond the limit", f"{limit} rows of its kind are enough")
        if self._near and row.signature and (similar := self._near.find(row.signature)):
            raise InvalidRow("near duplicate", f"{similar[1]:.2f} like {similar[0]}")
        self._ledger.keep(row.text, output=output, key=row.key)
        self._taken[output] += 1
        if self._near and row.signature:
            self._near.add(place, row.signature)


def evaluation_texts(names: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """User turns of evaluation sets with their places, and the sets' identities; a ValueError if a row is invalid."""
    if not names:
        return [], {}
    inputs = open_inputs(names, limited=False, option="--decontaminate")
    texts: list[tuple[str, str]] = []
    for source, line, entry in rows_of(inputs):
        place = f"{source}, line {line}"
        try:
            with errors_as_invalid_row():
                texts += [(place, turn) for turn in user_turns(read_conversation(entry))]
        except InvalidRow as error:
            raise ValueError(f"--decontaminate {place}: {error}") from error
    return texts, inputs.identities


def select_prompts(options: PromptOptions) -> str:
    """Write the prompts of all outputs; returns a sentence about the result."""
    inputs = open_inputs(options.input, limited=options.limit is not None)
    texts, sets = evaluation_texts(options.decontaminate)
    share = {"heldout_share": 0.0} if options.heldout is None else {}
    rules = Rules(**options.model_dump(include=set(Rules.model_fields)) | share)
    depends = {
        **rules.model_dump(),
        **options.model_dump(include={"heldout_limit", "interleave"}),
        "decontaminate": sets,
        "format_version": FORMAT_VERSION,
    }
    heldout = [options.heldout] if options.heldout else []

    def work(ledger: Ledger) -> Mapping[str, Any]:
        selector = PromptSelector(ledger, rules.near, [options.limit, options.heldout_limit][: len(ledger.outputs)])
        with WorkerPool(options.workers, prepare_screening, rules, texts) as pool:
            rows = RowStream(inputs, pool, ledger, interleave=options.interleave)
            for source, results in rows:
                rows.unread(selector.take(source, results))
                if selector.is_full:
                    break
        if not ledger.counts()[0]:
            raise ValueError(f"not one prompt in {rows.rows_in} rows: {ledger.reasons()}")
        return {"rows_in": rows.rows_in}

    return run_job("prompts", options, inputs, depends, work, more_outputs=heldout, reads=options.decontaminate)


main = partial(run_command, Command(PromptOptions, select_prompts), module="data_prep.prompts", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
