"""Rows of all inputs through worker processes, in order; a continued job begins where it stopped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from tqdm import tqdm

from data_prep.pipeline.worker_pool import WorkerPool
from data_prep.readers.chunks import Chunk
from data_prep.readers.inputs import Input, Inputs
from specforge_dspine.utils.ledger import Ledger

COMMIT_S = 2.0  # seconds of work that a kill may cost
MIN_AHEAD = 4  # chunks that each of many interleaved inputs has under way: of a small file all, so that it is closed


class RowStream:
    """What a pool's function returns for the rows of all inputs, in order. The position is in the ledger.

    ``interleave`` takes a row of each input in turn, instead of one input after the other.
    """

    def __init__(self, inputs: Inputs, pool: WorkerPool, ledger: Ledger, *, interleave: bool = False) -> None:
        was = ledger.fact("position") or {"streams": [], "next": 0, "rows_in": 0}
        sequences = [[each] for each in inputs.found] if interleave else [inputs.found]
        positions = was["streams"] or [(0, 0, 0)] * len(sequences)
        self._streams = [_InputStream(*each, pool) for each in zip(sequences, positions, strict=True)]
        self._next: int | None = was["next"]
        self._ledger, self._pool, self._interleave = ledger, pool, interleave
        self.rows_in: int = was["rows_in"]

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        """A source and the results of some of its rows. Whoever takes fewer of them calls ``unread``."""
        committed = time.monotonic()
        with tqdm(desc="rows", unit=" rows", initial=self.rows_in, disable=None) as bar:
            while self._next is not None:
                source, results = self._take(self._next)
                order = [*range(self._next + 1, len(self._streams)), *range(self._next + 1)]
                self._next = next((k for k in order if not self._streams[k].is_dry), None)
                if not results:
                    continue
                self.rows_in += len(results)
                yield source, results
                bar.update(len(results))
                if time.monotonic() - committed > COMMIT_S:
                    self._commit()
                    committed = time.monotonic()

    def unread(self, rows: int) -> None:
        """Some rows were read, but are not needed: they did not come in."""
        self.rows_in -= rows

    def _take(self, index: int) -> tuple[str, list[Any]]:
        if not self._interleave:
            return self._streams[index].take(None, self._pool.ahead)
        share = max(MIN_AHEAD, -(-self._pool.ahead // len(self._streams)))
        for stream in self._streams[index : index + self._pool.ahead]:  # their turns come soon
            stream.look_ahead(share)
        return self._streams[index].take(1, share)

    def _commit(self) -> None:
        positions = [stream.position for stream in self._streams]
        self._ledger.set_fact("position", {"streams": positions, "next": self._next, "rows_in": self.rows_in})
        self._ledger.commit()


class _InputStream:
    """Results for the rows of inputs, one input after the other."""

    def __init__(self, inputs: Sequence[Input], position: Sequence[int], pool: WorkerPool) -> None:
        self.position = tuple(position)  # inputs done with, chunks of the one after, rows of the chunk after those
        self.is_dry = False
        self._pool = pool
        self._chunks = self._numbered_chunks(inputs)
        self._jobs: deque[tuple[int, int, Callable[[], Any]]] = deque()
        self._current: tuple[str, list[Any]] = "", []

    def _numbered_chunks(self, inputs: Sequence[Input]) -> Iterator[tuple[int, int, Chunk]]:
        """Chunks after the position, each with its input's number and its own."""
        number, place, _ = self.position
        for k, each in enumerate(inputs[number:], number):
            first = place if k == number else 0
            for at, chunk in enumerate(islice(each.chunks(), first, None), first):
                yield k, at, chunk

    def look_ahead(self, count: int) -> None:
        """Have ``count`` chunks under way, if there are so many."""
        for number, place, chunk in islice(self._chunks, max(0, count - len(self._jobs))):
            self._jobs.append((number, place, self._pool.submit(chunk)))

    def take(self, count: int | None, ahead: int) -> tuple[str, list[Any]]:
        """The next ``count`` rows, or all that are at hand; none at the end. ``ahead`` chunks are under way."""
        number, place, row = self.position
        source, results = self._current
        while row >= len(results):
            self.look_ahead(ahead)
            if not self._jobs:
                self.is_dry, self._current = True, ("", [])
                return self._current
            was, (number, place, result) = (number, place), self._jobs.popleft()
            row = row if (number, place) == was else 0  # the first chunk of a continued job was begun already
            source, results = self._current = result()
        part = results[row : None if count is None else row + count]
        self.position = number, place, row + len(part)
        return source, part
