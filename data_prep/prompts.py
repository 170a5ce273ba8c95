"""Prompts for training and for held-out evaluation, out of what people have.

    python -m data_prep.prompts --input sharegpt.json chatterbot ORG/NAME --output data/train.jsonl \\
        [--heldout data/heldout.jsonl --heldout-share 0.01] [--near 0.8] [--decontaminate mt-bench human-eval] ...

Each line of the outputs is one conversation, which ends with a user turn::

    {"id": str, "source": str, "line": int, "messages": [{"role": "user", "content": str}, ...]}

Assistant turns are kept only as places: regeneration replaces them with the target's own. A prompt that occurs again,
up to case and white space of its system and user messages, is dropped. Held out are prompts by a hash of their first
user turn, so that no conversation begins alike on both sides, now or with other files; one whose later turns could
begin a held-out one is not trained on. OUTPUT.dropped.jsonl names every dropped row: file, line, reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.cleaning.conversations import read_conversation, user_turns
from data_prep.cleaning.exact_dedup import SeenKeys
from data_prep.cleaning.filters import Good, Rules, prepare
from data_prep.pipeline.command import Passage, open_ledger, parser, perform
from data_prep.pipeline.rows import Bad, guarded
from data_prep.pipeline.worker_pool import Workers
from data_prep.readers.inputs import open_inputs, rows_of
from specforge_dspine.utils.cli import positive, run
from specforge_dspine.utils.invalid_row import InvalidRow
from specforge_dspine.utils.ledger import Ledger, read_kept_keys

TRAIN, HELDOUT = 0, 1
"""Numbers of the two outputs."""

HELDOUT_SHARE = 0.01


class Choice:
    """Takes rows in their order, and drops what is there already or no longer wanted.

    Args:
        limits: how many rows each output takes, None for all.
    """

    def __init__(self, ledger: Ledger, rules: Rules, limits: Sequence[int | None]) -> None:
        self._ledger = ledger
        self._limits = limits
        self._seen = SeenKeys()
        self._seen.extend(np.fromiter(read_kept_keys(ledger.db), np.uint64))
        counts = dict(ledger.db.execute("SELECT output, COUNT(*) FROM kept GROUP BY output").fetchall())
        self._taken = [counts.get(number, 0) for number in range(len(limits))]
        self._near = None
        if rules.near is not None:
            from data_prep.cleaning.near_dedup import NearIndex

            self._near = NearIndex(ledger.db, rules.near)

    @property
    def is_full(self) -> bool:
        """Whether there are as many training prompts as wanted, and held-out ones if their number was given."""
        pairs = zip(self._taken, self._limits, strict=True)
        return self._limits[TRAIN] is not None and all(limit is None or taken >= limit for taken, limit in pairs)

    def take(self, source: str, results: Sequence[Good | Bad]) -> int:
        """Keeps or drops rows until the outputs are full; returns how many were left untouched."""
        known = self._seen.known([result.key if isinstance(result, Good) else 0 for result in results])
        for at, (result, was_known) in enumerate(zip(results, known, strict=True)):
            if self.is_full:
                return len(results) - at
            if isinstance(result, Good):
                self._take(source, result, was_known)
            else:
                self._ledger.drop(source, result.line, result.reason, result.detail)
        return 0

    def _take(self, source: str, row: Good, was_known: bool) -> None:
        output = HELDOUT if row.heldout else TRAIN
        limit = self._limits[output]
        place = f"{source}, line {row.line}"
        if was_known or not self._seen.is_new(row.key):
            self._ledger.drop(source, row.line, "duplicate", "the same prompt came before")
        elif limit is not None and self._taken[output] >= limit:
            self._ledger.drop(source, row.line, "beyond the limit", f"{limit} rows of its kind are enough")
        elif self._near and row.signature and (found := self._near.find(row.signature)):
            self._ledger.drop(source, row.line, "near duplicate", f"{found[1]:.2f} like {found[0]}")
        else:
            self._ledger.keep(row.text, output=output, key=row.key)
            self._seen.add(row.key)
            self._taken[output] += 1
            if self._near and row.signature:
                self._near.add(place, row.signature)


def evaluation_texts(names: Sequence[str]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The user turns of evaluation sets with their places, and the sets' identities.

    Raises:
        ValueError: a set that cannot be read whole: then nobody could say what is in it.
    """
    if not names:
        return [], []
    inputs = open_inputs(names, limited=False)
    texts: list[tuple[str, str]] = []
    for source, line, entry in rows_of(inputs):
        try:
            with guarded():
                turns = user_turns(read_conversation(entry))
            texts += [(f"{source}, line {line}", turn) for turn in turns]
        except InvalidRow as odd:
            raise ValueError(f"--decontaminate {source}, line {line}: {odd}") from odd
    return texts, inputs.identities


def choose(options: argparse.Namespace) -> str:
    """Does what the command line says; returns a sentence about the result.

    Raises:
        ValueError: bad options or inputs, outputs of another job, or not one prompt.
    """
    if options.heldout is None and (options.heldout_share, options.heldout_limit) != (None, None):
        raise ValueError("--heldout-share and --heldout-limit: name with --heldout where held-out prompts go")
    share = HELDOUT_SHARE if options.heldout_share is None else options.heldout_share
    if not 0 <= share < 1:
        raise ValueError(f"--heldout-share {options.heldout_share}: from 0 to below 1")
    if options.near is not None and not 0 < options.near <= 1:
        raise ValueError(f"--near {options.near}: a similarity above 0 and up to 1")
    inputs = open_inputs(options.input, limited=options.limit is not None)
    texts, sets = evaluation_texts(options.decontaminate)
    rules = Rules(
        max_turns=options.max_turns,
        min_chars=options.min_chars,
        max_chars=options.max_chars,
        languages=tuple(options.language),
        heldout_share=share if options.heldout else 0.0,
        near=options.near,
    )
    further = [options.heldout] if options.heldout else []
    limits = [options.limit, *([options.heldout_limit] if further else [])]
    ledger = open_ledger(
        "prompts",
        options,
        inputs,
        {
            **asdict(rules),
            "decontaminate": sets,
            "heldout_limit": options.heldout_limit,
            "in_turn": options.in_turn,
        },
        further=further,
        reads=options.decontaminate,
    )

    def work(ledger: Ledger) -> Mapping[str, Any]:
        choice = Choice(ledger, rules, limits)
        with Workers(options.workers, prepare, rules, texts) as workers:
            passage = Passage(inputs, workers, ledger, in_turn=options.in_turn)
            for source, results in passage:
                passage.give_back(choice.take(source, results))
                if choice.is_full:
                    break
        if not ledger.counts()[0]:
            raise ValueError(f"not one prompt in {passage.rows_in} rows: {ledger.reasons()}")
        return {"rows_in": passage.rows_in}

    return perform(ledger, work, inputs.ignored)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    made = parser("prompts", __doc__, workers=True)
    made.add_argument("--heldout", type=Path, metavar="FILE", help="where held-out prompts go (default: none are)")
    made.add_argument("--heldout-share", type=float, metavar="X", help=f"of all prompts (default {HELDOUT_SHARE})")
    made.add_argument("--heldout-limit", type=positive, metavar="N", help="held-out prompts at most")
    made.add_argument("--in-turn", action="store_true", help="a row of each input in turn, not one after the other")
    made.add_argument("--max-turns", type=positive, metavar="N", help="user turns kept of each (default: all)")
    made.add_argument("--min-chars", type=positive, default=1, metavar="N", help="of system and user messages")
    made.add_argument("--max-chars", type=positive, metavar="N", help="of system and user messages")
    made.add_argument(
        "--language", nargs="+", default=[], metavar="CODE", help="such as en de: drops other languages"
    )
    made.add_argument("--near", type=float, metavar="J", help="drops prompts this similar, such as 0.8 (MinHash)")
    made.add_argument("--decontaminate", nargs="+", default=[], metavar="FILE|NAME", help="evaluation sets")
    run(made, choose, arguments)


if __name__ == "__main__":
    main()
