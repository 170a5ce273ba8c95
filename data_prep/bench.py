"""How many rows a second data_prep.prompts does, beside reading the same file with ``json`` alone.

    python -m data_prep.bench [--megabytes 200] [--output runs/bench/data.json]

A ShareGPT file of that size is generated, read line by line with ``json.loads``, and then chosen from with one worker
and with one per core: exact duplicates, held-out share, and last the near duplicates too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.pipeline.worker_pool import cores
from data_prep.prompts import main as choose
from specforge_dspine.utils.cli import positive
from specforge_dspine.utils.files import atomic_write, to_line

COMMON_WORDS = """
the of to and a in is it you that he was for on are with as his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go
"""

SENTENCES = 4000


def chats(megabytes: float, seed: int = 0) -> Iterator[bytes]:
    """ShareGPT rows of about two kilobytes, ``megabytes`` of them, every one different."""
    draw, words = random.Random(seed), COMMON_WORDS.split()
    sentences = [" ".join(draw.choices(words, k=draw.randint(6, 16))) for _ in range(SENTENCES)]
    size, number = 0.0, 0
    while size < megabytes * 1e6:
        turns = []
        for turn in range(draw.choice((2, 2, 4, 6))):
            text = ". ".join(draw.choices(sentences, k=draw.randint(2, 6) if turn % 2 == 0 else draw.randint(4, 16)))
            role = "gpt" if turn % 2 else "human"
            turns.append({"from": role, "value": text if turn else f"Question {number}: {text}"})
        row = to_line({"id": f"chat_{number}", "conversations": turns})
        yield row
        size, number = size + len(row), number + 1


def write_chats(path: Path, megabytes: float) -> int:
    """Writes :func:`chats` as the array that ShareGPT's file is (.json) or line by line; returns the rows."""
    rows = 0
    bar = tqdm(chats(megabytes), desc=f"generating {path.name}", unit=" rows", leave=False, disable=None)
    with atomic_write(path) as file:
        is_array = path.suffix == ".json"
        for rows, row in enumerate(bar, 1):
            before = b"" if not is_array else b"[" if rows == 1 else b","
            file.write(before + row)
        if is_array:
            file.write(b"]\n")
    return rows


def json_alone(path: Path) -> float:
    """Seconds that ``json.loads`` takes for every line."""
    started = time.monotonic()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.monotonic() - started


def measure(megabytes: float) -> dict[str, Any]:
    """All figures: rows, and per way of reading them seconds and rows a second."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = folder / "chats.jsonl"
        rows = write_chats(lines, megabytes)
        figures: dict[str, Any] = {"rows": rows, "megabytes": lines.stat().st_size / 1e6, "cores": cores()}
        figures["json alone"] = _figure(rows, json_alone(lines))
        ways = {
            "prompts, 1 worker": ["--workers", "1"],
            f"prompts, {cores()} workers": [],
            f"prompts, {cores()} workers, near duplicates": ["--near", "0.8"],
        }
        for name, options in ways.items():
            output = folder / f"{len(figures)}.jsonl"
            more = ["--heldout", f"{output}.heldout", *options]
            started = time.monotonic()
            choose(["--input", str(lines), "--output", str(output), *more])
            figures[name] = _figure(rows, time.monotonic() - started)
    return figures


def _figure(rows: int, seconds: float) -> dict[str, float]:
    return {"seconds": round(seconds, 2), "rows_per_second": round(rows / seconds)}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    made = argparse.ArgumentParser(
        prog="python -m data_prep.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--megabytes", type=positive, default=200, metavar="N", help="of the file (default 200)")
    made.add_argument("--output", type=Path, metavar="FILE", help="JSON with the figures")
    options = made.parse_args(arguments)
    figures = measure(options.megabytes)
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{name:<40} {value['rows_per_second']:>8} rows/s {value['seconds']:>8.1f} s")
        else:
            print(f"{name:<40} {value:>8.0f}")
    if options.output is not None:
        with atomic_write(options.output) as file:
            file.write((json.dumps(figures, indent=2) + "\n").encode())
        print(f"written to {options.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
