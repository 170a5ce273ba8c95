"""Rows on their way through workers: in order, on all cores, and continued where they stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.pipeline.row_stream import RowStream
from data_prep.pipeline.worker_pool import MAX_INLINE, WorkerPool
from data_prep.readers.chunks import Chunk
from data_prep.readers.inputs import Inputs, open_inputs
from specforge_dspine.utils.ledger import Ledger
from tests.conftest import wait_for

FILES = 12


def prepare(folder: Path, count: int) -> Callable[[Chunk], tuple[str, list[Any]]]:
    """Waits for all processes: a machine under load starts one long before the other."""
    (folder / str(os.getpid())).touch()
    wait_for(lambda: len(list(folder.iterdir())) >= count, 120)

    def work(chunk: Chunk) -> tuple[str, list[Any]]:
        time.sleep(0.02)  # else one worker might take them all
        return chunk.source, [(entry["prompt"], os.getpid()) for _, entry in chunk.rows()]

    return work


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    """Small files of 0, 1 or 2 rows."""
    for number in range(FILES):
        text = "".join(json.dumps({"prompt": f"{number}.{row}"}) + "\n" for row in range(number % 3))
        (tmp_path / f"{number:02}.jsonl").write_text(text)
    return open_inputs([str(tmp_path)])


def taken(
    inputs: Inputs, out: Path, count: int, *, interleave: bool, stop_after: int | None = None
) -> list[tuple[str, int]]:
    """What comes of the rows until it is enough; then everything is committed."""
    found: list[tuple[str, int]] = []
    present = out.with_name(f"{out.name}.workers")
    present.mkdir(parents=True, exist_ok=True)
    processes = count + 1 if count > 1 else 1  # this one does the first chunks
    with Ledger([out], "test", {}) as ledger, WorkerPool(count, prepare, present, processes) as workers:
        rows = RowStream(inputs, workers, ledger, interleave=interleave)
        for _, results in rows:
            found += results
            if stop_after is not None and len(found) >= stop_after:
                rows._commit()
                break
    return found


@pytest.mark.parametrize("interleave", [False, True])
def test_many_small_files_use_all_workers_and_stay_in_order(tmp_path: Path, inputs: Inputs, interleave: bool) -> None:
    single = taken(inputs, tmp_path / "out" / "a", 1, interleave=interleave)
    parallel = taken(inputs, tmp_path / "out" / "b", 2, interleave=interleave)
    names = [f"{number}.{row}" for number in range(FILES) for row in range(number % 3)]
    ordered = sorted(names, key=lambda name: name.partition(".")[2]) if interleave else names
    assert [name for name, _ in single] == [name for name, _ in parallel] == ordered
    here = [pid == os.getpid() for _, pid in parallel]
    assert 0 < sum(here) <= 2 * MAX_INLINE and len({pid for _, pid in parallel}) == 3
    assert {pid for _, pid in single} == {os.getpid()}


@pytest.mark.parametrize("interleave", [False, True])
def test_continued_at_every_row_gives_every_row_once(tmp_path: Path, inputs: Inputs, interleave: bool) -> None:
    whole = taken(inputs, tmp_path / "out" / "a", 1, interleave=interleave)
    for stop in range(1, len(whole)):
        out = tmp_path / "out" / f"{stop}"
        first = taken(inputs, out, 1, interleave=interleave, stop_after=stop)
        assert first + taken(inputs, out, 1, interleave=interleave) == whole
