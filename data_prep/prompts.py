"""Prompts for training and for held-out evaluation, from packages, files, or a hub.

    python -m data_prep.prompts --sources chatterbot,reasoning-gym --limit 250 --heldout 80 --seed 0 --out DIR

writes ``train.jsonl`` and ``heldout.jsonl``, one conversation per line::

    {"id": str, "source": str, "messages": [{"role": "user", "content": str}, ...]}

which ends with a user turn. Assistant turns are kept only as places: regeneration replaces them with the
target's own. First turns are unique over both files up to case and white space, and no user turn of the
training file is the first turn of a held-out conversation. ``skipped.jsonl`` names every entry that was
left out, with its line and the reason. The seed decides everything.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.chat import Message
from data_prep.files import write_jsonl
from data_prep.sources import SYNTAX, Candidate, Skip, open_source

DEFAULT_MAX_TURNS = 4


@dataclass
class Selection:
    """The two files' rows, and what was left out."""

    train: list[dict[str, Any]] = field(default_factory=list)
    heldout: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)


def select(
    specs: Sequence[str],
    *,
    limit: int | None,
    heldout: int,
    seed: int,
    max_turns: int = DEFAULT_MAX_TURNS,
) -> Selection:
    """Draws in turn from all sources: ``heldout`` conversations first, then ``limit`` for training (None: all).

    A source that runs dry leaves its share to the others. ``max_turns`` user turns of a conversation are kept.

    Raises:
        ValueError: a bad count or source, or fewer conversations than ``heldout`` + 1.
    """
    for name, value, least in (("limit", limit, 1), ("heldout", heldout, 0), ("max_turns", max_turns, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} = {value}: at least {least}")
    result = Selection()
    sources = [open_source(spec, seed, max_turns, result.skipped.append) for spec in specs]
    if limit is None and any(source.endless for source in sources):
        raise ValueError("limit is not set, but reasoning-gym has no end: say how many prompts to take")
    seen: set[str] = set()
    for row in _draw([source.heldout for source in sources], heldout, seen, set(), result.skipped):
        result.heldout.append(row)
    banned = {turn_key(first_turn(row["messages"])) for row in result.heldout}
    for row in _draw([source.train for source in sources], limit, seen, banned, result.skipped):
        result.train.append(row)
    if len(result.heldout) < heldout or not result.train:
        raise ValueError(
            f"the sources {', '.join(specs)} hold {len(result.heldout) + len(result.train)} usable "
            f"conversations, too few for heldout = {heldout} and training: add a source or lower heldout "
            f"({len(result.skipped)} entries were skipped{_reasons(result.skipped)})"
        )
    return result


def _draw(
    streams: list[Iterator[Candidate]],
    wanted: int | None,
    seen: set[str],
    banned: set[str],
    skipped: list[Skip],
) -> Iterator[dict[str, Any]]:
    """Conversations with new first turns, one from each stream in turn, until all are dry."""
    streams = list(streams)
    taken = 0
    while streams and taken != wanted:
        stream = streams.pop(0)
        for candidate in stream:
            users = [turn_key(part["content"]) for part in candidate.messages if part["role"] == "user"]
            if users[0] in seen:
                skipped.append(Skip(candidate.source, candidate.line, "duplicate first turn"))
            elif banned.intersection(users):
                skipped.append(Skip(candidate.source, candidate.line, "holds a held-out first turn"))
            else:
                seen.add(users[0])
                taken += 1
                streams.append(stream)
                yield {
                    "id": _identity(candidate.source, users[0]),
                    "source": candidate.source,
                    "messages": candidate.messages,
                }
                break


def turn_key(text: str) -> str:
    """By which turns are compared: case folded, white space collapsed."""
    return " ".join(text.casefold().split())


def first_turn(messages: Sequence[Message]) -> str:
    """The first user turn, by which prompts are told apart."""
    return next(message["content"] for message in messages if message["role"] == "user")


def _identity(source: str, key: str) -> str:
    label = re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-")[:60]
    return f"{label}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _reasons(skipped: Sequence[Skip]) -> str:
    counts = Counter(skip.reason for skip in skipped)
    return "".join(f"; {number} × {reason}" for reason, number in counts.most_common())


def write(selection: Selection, out: Path) -> None:
    """Writes ``train.jsonl``, ``heldout.jsonl`` and ``skipped.jsonl`` into ``out``, each at once."""
    write_jsonl(out / "skipped.jsonl", [asdict(skip) for skip in selection.skipped])
    write_jsonl(out / "heldout.jsonl", selection.heldout)
    write_jsonl(out / "train.jsonl", selection.train)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.prompts", description="Choose training and held-out prompts."
    )
    parser.add_argument("--sources", required=True, help=f"{SYNTAX}; several separated by commas")
    parser.add_argument("--limit", type=int, help="training conversations (default: all there are)")
    parser.add_argument("--heldout", type=int, default=0, help="held-out conversations (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-turns", type=int, default=DEFAULT_MAX_TURNS, help="user turns kept of each")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    options = parser.parse_args(arguments)
    try:
        selection = select(
            options.sources.split(","),
            limit=options.limit,
            heldout=options.heldout,
            seed=options.seed,
            max_turns=options.max_turns,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    write(selection, options.out)
    if options.limit and len(selection.train) < options.limit:
        print(f"only {len(selection.train)} of {options.limit} training prompts exist", file=sys.stderr)
    if selection.skipped:
        where = options.out / "skipped.jsonl"
        print(f"skipped {len(selection.skipped)} entries, see {where}{_reasons(selection.skipped)}", file=sys.stderr)
    print(f"{len(selection.train)} training and {len(selection.heldout)} held-out prompts in {options.out}")


if __name__ == "__main__":
    main()
