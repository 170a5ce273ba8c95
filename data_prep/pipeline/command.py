"""What all commands share: their form, the pass of rows through workers into a ledger, and how they end.

python -m data_prep.X --input FILE|DIR|NAME ... --output FILE [--limit N] [--workers N] [--overwrite] ...
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.pipeline.code_version import code_version
from data_prep.pipeline.worker_pool import Job, Workers, cores
from data_prep.readers.chunks import Chunk
from data_prep.readers.inputs import Input, Inputs
from specforge_dspine.utils.cli import positive
from specforge_dspine.utils.ledger import Ledger

COMMIT_S = 2.0
"""Seconds of work that a kill may cost."""
SHOWN_REASONS = 12
IN_TURN = 4
"""Chunks that each of many inputs has under way at least: of a small file all, so that it is closed."""
INPUT_HELP = (
    "files (.json, .jsonl, .parquet; .gz, .zst), folders, packages (chatterbot, reasoning-gym, ...), hub names"
)


def parser(name: str, text: str, *, workers: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that every command has; ``workers`` for those that use all cores."""
    made = argparse.ArgumentParser(
        prog=f"python -m data_prep.{name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--input", nargs="+", required=True, metavar="FILE|DIR|NAME", help=INPUT_HELP)
    made.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to make")
    made.add_argument("--limit", type=positive, metavar="N", help="rows to take at most (default: all)")
    if workers:
        made.add_argument("--workers", type=positive, default=cores(), metavar="N", help="default: one per core")
    made.add_argument("--overwrite", action="store_true", help="replace what is there, once this is done")
    return made


def open_ledger(
    command: str,
    options: argparse.Namespace,
    inputs: Inputs,
    depends: Mapping[str, Any],
    *,
    further: Sequence[Path] = (),
    reads: Sequence[str] = (),
) -> Ledger:
    """The ledger of a command's ``--output`` and ``further`` outputs.

    Args:
        depends: what decides the output beside the inputs, the limit and the code.
        reads: names of what is read beside ``--input``.

    Raises:
        LedgerError: an output is an input, or another output.
    """
    files = [each.name for each in inputs.found]
    roots = [Path(name) for name in options.input if Path(name).is_dir()]
    folders = {
        str(parent) for name in files for parent in Path(name).parents if any(r in parent.parents for r in roots)
    }
    return Ledger(
        [options.output, *further],
        command,
        {"files": inputs.identities, "limit": options.limit, "code": code_version(), **depends},
        reads=[*(name for name in options.input if Path(name).exists()), *files, *folders, *reads],
        overwrite=options.overwrite,
    )


def perform(
    ledger: Ledger,
    work: Callable[[Ledger], Mapping[str, Any]],
    ignored: Sequence[str] = (),
) -> str:
    """Does ``work``, or finds it done: returns a sentence about the output.

    ``work`` gets the opened ledger and returns facts for the summary, among them ``rows_in``.
    """
    if ledger.is_finished():
        return f"{ledger.output} is there already, made from these very inputs"
    for path in ignored:
        print(f"not read: {path}", file=sys.stderr)
    with ledger:
        ended = ledger.ended()
        if ended is None:
            facts = dict(work(ledger))
            ended = {"rows_in": facts.pop("rows_in"), "rows_kept": facts.pop("rows_kept", None), "facts": facts}
        summary = ledger.finish(**ended)
    dropped = summary["rows_dropped"]
    for reason, number in list(dropped.items())[:SHOWN_REASONS]:
        print(f"dropped {number}: {reason}", file=sys.stderr)
    if dropped:
        print(f"every dropped row with its line: {ledger.dropped_path}", file=sys.stderr)
    if "rows_by_file" not in summary:
        return f"{summary['rows_in']} rows read, {summary['rows_kept']} of them good; see {ledger.output}"
    files = ", ".join(f"{number} in {name}" for name, number in summary["rows_by_file"].items())
    return f"{summary['rows_in']} rows read, {summary['rows_kept']} kept ({files})"


class Passage:
    """The rows of all inputs on their way through workers, in order; a continued job begins where it stopped.

    Args:
        in_turn: takes a row of each input in turn, instead of one input after the other.
    """

    def __init__(self, inputs: Inputs, workers: Workers, ledger: Ledger, *, in_turn: bool = False) -> None:
        was = ledger.fact("position") or {}
        self._ledger = ledger
        self._workers = workers
        sequences = [[each] for each in inputs.found] if in_turn else [inputs.found]
        self._streams = [
            _Stream(sequence, was.get("streams", {}).get(str(k), (0, 0, 0)), workers)
            for k, sequence in enumerate(sequences)
        ]
        self._next = was.get("next", 0)
        self._in_turn = in_turn
        self.rows_in: int = was.get("rows_in", 0)

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        """A source and what a worker said of some of its rows; whoever takes less of them calls :meth:`give_back`."""
        committed = time.monotonic()
        with tqdm(desc="rows", unit=" rows", initial=self.rows_in, disable=None) as bar:
            while self._next is not None:
                source, results = self._take(self._next)
                self._next = self._following(self._next)
                if not results:
                    continue
                self.rows_in += len(results)
                yield source, results
                bar.update(len(results))
                if time.monotonic() - committed > COMMIT_S:
                    self._commit()
                    committed = time.monotonic()

    def give_back(self, rows: int) -> None:
        """Some rows were read, but are not needed: they did not come in."""
        self.rows_in -= rows

    def _take(self, index: int) -> tuple[str, list[Any]]:
        if not self._in_turn:
            return self._streams[index].take(None, self._workers.ahead)
        share = max(IN_TURN, -(-self._workers.ahead // len(self._streams)))
        for stream in self._streams[index : index + self._workers.ahead]:  # their turns come soon
            stream.look_ahead(share)
        return self._streams[index].take(1, share)

    def _following(self, index: int) -> int | None:
        order = [*range(index + 1, len(self._streams)), *range(index + 1)]
        return next((k for k in order if not self._streams[k].is_dry), None)

    def _commit(self) -> None:
        streams = {str(k): stream.position for k, stream in enumerate(self._streams)}
        self._ledger.set_fact("position", {"streams": streams, "next": self._next, "rows_in": self.rows_in})
        self._ledger.commit()


class _Stream:
    """What workers say of the rows of inputs, one after the other.

    Attributes:
        position: inputs that are done with, chunks of the one after them, rows of the chunk after those.
    """

    def __init__(self, inputs: Sequence[Input], position: tuple[int, int, int], workers: Workers) -> None:
        self.position = position
        self.is_dry = False
        self._workers = workers
        self._chunks = self._all_chunks(inputs, *position[:2])
        self._jobs: deque[tuple[int, int, Job]] = deque()
        self._current: tuple[str, list[Any]] | None = None

    def look_ahead(self, count: int) -> None:
        """Has ``count`` chunks under way, if there are so many."""
        for number, place, chunk in islice(self._chunks, max(0, count - len(self._jobs))):
            self._jobs.append((number, place, self._workers.submit(chunk)))

    def take(self, count: int | None, ahead: int) -> tuple[str, list[Any]]:
        """The next ``count`` rows, or all that are at hand; none at the end. ``ahead`` chunks are under way."""
        number, place, row = self.position
        while self._current is None or row >= len(self._current[1]):
            if self._current is not None:
                place, row = place + 1, 0
            self.look_ahead(ahead)
            if not self._jobs:
                self.is_dry, self._current = True, None
                return "", []
            was, (number, place, job) = (number, place), self._jobs.popleft()
            row = row if (number, place) == was else 0
            self._current = job.result()
        source, results = self._current
        part = results[row : None if count is None else row + count]
        self.position = number, place, row + len(part)
        return source, part

    @staticmethod
    def _all_chunks(inputs: Sequence[Input], number: int, place: int) -> Iterator[tuple[int, int, Chunk]]:
        for k, each in enumerate(inputs[number:], number):
            first = place if k == number else 0
            for at, chunk in enumerate(islice(each.chunks(), first, None), first):
                yield k, at, chunk
