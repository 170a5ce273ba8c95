"""Rows a second of data_prep.prompts, beside reading the same file with ``json`` alone.

    python -m data_prep.bench [--megabytes 200] [--output runs/bench/data.json]

A ShareGPT file of that size is generated, read line by line with ``json.loads``, and then selected from: with one
worker and one per core, from the same rows as an array, and last without near duplicates too.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.pipeline.worker_pool import cores
from data_prep.prompts import main as select_prompts
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import atomic_write, to_line, write_json

COMMON_WORDS = """
the of to and a in is it you that he was for on are with as his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go
"""
SENTENCES = 4000


def chats(megabytes: float) -> Iterator[bytes]:
    """ShareGPT rows of about two kilobytes, ``megabytes`` of them, every one different."""
    draw, words = random.Random(0), COMMON_WORDS.split()
    sentences = [" ".join(draw.choices(words, k=draw.randint(6, 16))) for _ in range(SENTENCES)]
    size = 0
    for number in count():
        turns = []
        for turn in range(draw.choice((2, 2, 4, 6))):
            text = ". ".join(draw.choices(sentences, k=draw.randint(2, 6) if turn % 2 == 0 else draw.randint(4, 16)))
            role = "gpt" if turn % 2 else "human"
            turns.append({"from": role, "value": text if turn else f"Question {number}: {text}"})
        row = to_line({"id": f"chat_{number}", "conversations": turns})
        yield row
        size += len(row)
        if size >= megabytes * 1e6:
            return


def write_chats(path: Path, megabytes: float) -> int:
    """Write ``chats`` as the array that ShareGPT's file is (.json) or line by line; returns the rows."""
    opening, separator, closing = (b"[", b",", b"]\n") if path.suffix == ".json" else (b"", b"", b"")
    rows = 0
    with atomic_write(path) as file:
        for row in tqdm(chats(megabytes), desc=f"generating {path.name}", unit=" rows", leave=False, disable=None):
            file.write((separator if rows else opening) + row)
            rows += 1
        file.write(closing)
    return rows


def measure(megabytes: float) -> dict[str, Any]:
    """All figures: rows, and per way of reading them seconds and rows a second."""

    def figure(since: float) -> dict[str, float]:
        seconds = time.monotonic() - since
        return {"seconds": round(seconds, 2), "rows_per_second": round(rows / seconds)}

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines, array = folder / "chats.jsonl", folder / "chats.json"
        rows = write_chats(lines, megabytes)
        write_chats(array, megabytes)
        figures: dict[str, Any] = {"rows": rows, "megabytes": lines.stat().st_size / 1e6, "cores": cores()}
        started = time.monotonic()
        with lines.open("rb") as file:
            for line in file:
                json.loads(line)
        figures["json alone"] = figure(started)
        ways: dict[str, tuple[Path, list[str]]] = {
            "prompts, 1 worker": (lines, ["--workers", "1"]),
            f"prompts, {cores()} workers": (lines, []),
            f"prompts, {cores()} workers, an array": (array, []),
            f"prompts, {cores()} workers, near duplicates": (lines, ["--near", "0.8"]),
        }
        for name, (path, words) in ways.items():
            output = folder / f"{len(figures)}.jsonl"
            files = ["--input", str(path), "--output", str(output), "--heldout", f"{output}.heldout"]
            started = time.monotonic()
            if select_prompts([*files, *words]):
                raise RunError(f"{name} failed; see its message above")
            figures[name] = figure(started)
    return figures


class BenchOptions(Options):
    """Options of the command."""

    megabytes: int = option("of the file", default=200, ge=1, metavar="N")
    output: Path | None = option("JSON with the figures", default=None, metavar="FILE")


def bench(options: BenchOptions) -> str:
    """Do what the command line says; returns the figures as lines."""
    figures = measure(options.megabytes)
    if options.output is not None:
        write_json(options.output, figures)
    ways = {name: value for name, value in figures.items() if isinstance(value, dict)}
    lines = [f"{name:<40} {way['rows_per_second']:>8} rows/s {way['seconds']:>8.1f} s" for name, way in ways.items()]
    return "\n".join([f"{figures['rows']} rows, {figures['megabytes']:.0f} MB, {figures['cores']} cores", *lines])


main = partial(run_command, Command(BenchOptions, bench), module="data_prep.bench", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
