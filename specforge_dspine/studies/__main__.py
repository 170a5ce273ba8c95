"""What a draft's layers know, and what they need: the readout and the intervention studies of the method's paper.

    python -m specforge_dspine.studies readout --draft DIR --target DIR --train FEATURES --heldout FEATURES --out DIR
        [--rank 64] [--steps N] [--batch N] [--rate R] [--anchors N] [--limit N] [--train-limit N] [--seed N]
    python -m specforge_dspine.studies timing --draft DIR --target DIR --heldout FEATURES --out DIR
        [--history K] [--anchors N] [--limit N] [--seed N] [--overwrite]

``--draft``: an export in either layout, or another's DFlash. FEATURES: folders of specforge_dspine.capture, the
target's greedy answers with its states over them.

``readout`` fits a low-rank readout to every layer on the training samples and says how often its first choice is
right on the held-out ones (readout.py): readout.json, .md, .png. ``timing`` makes the timing and the predecessor
interventions (interventions.py): timing.json, timing.md, timing.png, predecessor.png, and timing.jsonl with what
every prompt gave; the same command continues a study that was stopped. Fields: docs/studies.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from specforge_dspine.decoding.drafter import draft_all_anchors
from specforge_dspine.evaluation.benchmarks import Prompt
from specforge_dspine.streaming.record import RecordError
from specforge_dspine.studies.branches import encode
from specforge_dspine.studies.inputs import Pair, open_features, open_pair, record_of
from specforge_dspine.studies.interventions import carried, codes, predecessor, proposals_right, timing, whole_blocks
from specforge_dspine.studies.readout import Readouts, Rows, captured_rows, fit, merged, right_by_position
from specforge_dspine.studies.report import (
    PAPER,
    predecessor_picture,
    readout_markdown,
    readout_picture,
    remarks,
    timing_markdown,
    timing_picture,
)
from specforge_dspine.studies.statistics import intervention_figures, readout_figures
from specforge_dspine.utils.files import atomic_write, read_jsonl, to_line, write_json
from specforge_dspine.utils.ledger import Ledger
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions

SELECTING = 4  # every so-many-th held-out prompt selects readouts; the others measure them
STATE = (
    "h_ℓ is layer ℓ's output as the next layer receives it: after the injection, in a draft that has one. The "
    "draft's own output is the last layer's state through its norm and the head; refined: with the right "
    "predecessor's code."
)


def readout(options: argparse.Namespace) -> str:
    """Fit and measure the readouts; returns the Markdown that ``--out`` gets too.

    Raises:
        ValueError: bad options, drafts or features.
        RecordError: a captured record is damaged.
    """
    pair = open_pair(options)
    train = open_features(options.train, options.train_limit, pair.target).prompts
    heldout = open_features(options.heldout, options.limit, pair.target).prompts
    if shared := {prompt.name for prompt in train} & {prompt.name for prompt in heldout}:
        raise ValueError(
            f"{len(shared)} samples of {options.heldout} are in {options.train} too; {min(shared)} is one"
        )
    if len(heldout) < 2:
        raise ValueError(f"{options.heldout} gives {len(heldout)} sample: one selects readouts, others measure them")
    selecting, measuring = heldout[::SELECTING], [p for k, p in enumerate(heldout) if k % SELECTING]
    head, draft = pair.drafter.head.detach().float(), pair.drafter.draft
    started = time.monotonic()

    def rows(prompt: Prompt, draw: int, *, own: bool = False) -> Rows:
        name = f"{prompt.name}:{draw}"
        return captured_rows(
            pair.drafter, record_of(prompt), name, anchors=options.anchors, seed=options.seed, own=own
        )

    order = torch.Generator().manual_seed(options.seed)
    passes: list[Tensor] = []  # over the training samples, each in an order of its own

    def batch(step: int) -> Rows:
        parts = []
        for place in range(step * options.batch, (step + 1) * options.batch):
            epoch, index = divmod(place, len(train))
            while len(passes) <= epoch:
                passes.append(torch.randperm(len(train), generator=order))
            parts.append(rows(train[int(passes[epoch][index])], epoch))
        return merged(parts)

    layers, hidden = len(draft.layers), head.shape[1]
    generator = torch.Generator().manual_seed(options.seed)
    readouts = Readouts(layers, hidden, options.rank, generator).to(head.device)
    selection = merged([rows(prompt, 0) for prompt in selecting])
    history = fit(readouts, head, batch, selection, steps=options.steps, rate=options.rate)
    counts = [
        right_by_position(readouts, head, rows(prompt, 0, own=True), pair.proposals)
        for prompt in tqdm(measuring, desc="measuring", unit=" sample")
    ]
    result = pair.facts | {
        "study": "readout",
        "state": STATE,
        "notes": [STATE],
        "readout": {
            "rank": options.rank,
            "steps": options.steps,
            "samples_per_step": options.batch,
            "rate": options.rate,
            "anchors_per_sample": options.anchors,
            "checks": history,
            "selected_step": [min(history, key=lambda each: each["ce"][k])["step"] for k in range(layers)],
        },
        "samples": {
            "training samples": len(train),
            "held-out prompts that select": len(selecting),
            "held-out prompts that measure": len(measuring),
        },
        "sources": {"train": str(options.train), "heldout": str(options.heldout)},
        "paper": PAPER["readout"],
        "seconds": round(time.monotonic() - started, 1),
        **readout_figures(counts, pair.proposals + 1),
    }
    text = readout_markdown(result)
    options.out.mkdir(parents=True, exist_ok=True)
    readout_picture(options.out / "readout.png", result)
    write_page(options.out / "readout.md", text)
    write_json(options.out / "readout.json", result)
    return text


def interventions(options: argparse.Namespace) -> str:
    """Intervene on every prompt and write the figures; returns the Markdown that ``--out`` gets too.

    Raises:
        ValueError: bad options, drafts or features, or ``--out`` belongs to other inputs.
        RecordError: a captured record is damaged.
    """
    pair = open_pair(options)
    block = pair.proposals + 1
    k = max(0, block // 2 - 2) if options.history is None else options.history
    if not 0 <= k <= block - 3:
        raise ValueError(f"--history {k}: with blocks of {block}, 0 to {block - 3} leave an anchor and a position")
    heldout = open_features(options.heldout, options.limit, pair.target)
    facts = pair.facts | {
        "study": "timing",
        "history": k,
        "anchors_per_sample": options.anchors,
        "limit": options.limit,
        "sources": {"heldout": {"path": str(options.heldout), "sha256": heldout.sha256()}},
    }
    ledger = Ledger([options.out / "timing.jsonl"], "studies timing", facts, overwrite=options.overwrite)
    if not ledger.is_finished():
        with ledger:
            model: Any = AutoModelForCausalLM.from_pretrained(options.target, dtype=pair.drafter.embedding.dtype)
            model = model.to(options.device).eval()
            done = {record["prompt"] for record in ledger.kept()}
            for prompt in tqdm(heldout.prompts, desc="interventions", unit=" prompt", smoothing=0):
                if prompt.name not in done:
                    ledger.keep(to_line(intervene(pair, model, prompt, k, options)))
                    ledger.commit()
            ledger.finish(len(heldout.prompts), {})
    records = read_jsonl(options.out / "timing.jsonl")
    used = [record for record in records if record["blocks"]]
    if not used:
        raise ValueError(f"{options.heldout}: no answer has the {block} tokens in a row that a block needs")
    result = facts | {
        "samples": {
            "held-out prompts": len(used),
            "blocks": sum(record["blocks"] for record in used),
            "prompts whose answer is too short": len(records) - len(used),
        },
        "recomputed_states_differ": max(record["deviation"] for record in used),
        "paper": {name: PAPER[name] for name in ("timing", "predecessor")},
        "seconds": round(sum(record["seconds"] for record in records), 1),
        **intervention_figures(used, block),
    }
    result["notes"] = remarks(result)
    text = timing_markdown(result)
    timing_picture(options.out / "timing.png", result)
    predecessor_picture(options.out / "predecessor.png", result)
    write_page(options.out / "timing.md", text)
    write_json(options.out / "timing.json", result)
    return text


def write_page(path: Path, text: str) -> None:
    """Write Markdown at once."""
    with atomic_write(path) as file:
        file.write(text.encode())


def intervene(pair: Pair, model: Any, prompt: Prompt, k: int, options: argparse.Namespace) -> dict[str, Any]:
    """What one prompt gives, as timing.jsonl has it.

    Raises:
        RecordError: its record is damaged.
    """
    started, record, device = time.monotonic(), record_of(prompt), torch.device(options.device)
    ids, taps = record["input_ids"].to(device), record["hidden_states"][0].to(device)
    anchors = whole_blocks(record["loss_mask"], pair.proposals, prompt.name, limit=options.anchors, seed=options.seed)
    found: dict[str, Any] = {"prompt": prompt.name, "blocks": len(anchors)}
    if len(anchors):
        anchors = anchors.to(device)
        proposed = draft_all_anchors(pair.drafter, ids, taps, anchors).tokens
        branches = encode(model, pair.target.layers, ids, anchors, proposed)
        off = (branches.taps[: len(ids)].float() - taps.float()).norm() / taps.float().norm()
        found |= {
            "deviation": float(off),
            "anchors": anchors.tolist(),
            "proposed": proposed.tolist(),
            **lists(proposals_right(branches, k)),
            "timing": {
                output: {name: run.tolist() for name, run in schedules.items()}
                for output, schedules in timing(pair.drafter, branches, k).items()
            },
            "predecessor": lists(predecessor(pair.drafter, branches)),
            "carried": lists(carried(pair.drafter, branches)),
        }
        method = pair.drafter.draft.settings
        if method.injection and method.causal:
            found["codes"] = lists(codes(pair.drafter, branches))
    return found | {"seconds": round(time.monotonic() - started, 3)}


def lists(flags: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Flags [N] or [N, n] as files hold them."""
    return {name: value.int().tolist() for name, value in flags.items()}


def at_least(least: int) -> Any:
    """An argparse type: an integer of ``least`` or more."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: at least {least}")
        return int(text)

    return number


def parser() -> argparse.ArgumentParser:
    """The command line (see the module's text)."""
    whole = argparse.ArgumentParser(
        prog="python -m specforge_dspine.studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    studies = whole.add_subparsers(dest="study", required=True)
    commands = {
        "readout": (readout, "what can be read from every layer", 8),
        "timing": (interventions, "what right history and right predecessors are worth, and in which layers", 8),
    }
    for name, (run, text, anchors) in commands.items():
        each = studies.add_parser(name, help=text)
        each.set_defaults(run=run)
        each.add_argument("--draft", type=Path, required=True, help="exported draft")
        each.add_argument("--target", type=Path, required=True, help="the target's folder")
        each.add_argument("--heldout", type=Path, required=True, metavar="FEATURES", help="captured held-out samples")
        each.add_argument("--out", type=Path, required=True)
        each.add_argument("--limit", type=at_least(1), help="held-out samples (default: all)")
        each.add_argument("--anchors", type=at_least(1), default=anchors, help=f"of a sample (default {anchors})")
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    first, second = studies.choices["readout"], studies.choices["timing"]
    first.add_argument("--train", type=Path, required=True, metavar="FEATURES", help="captured training samples")
    first.add_argument("--train-limit", type=at_least(1), help="training samples (default: all)")
    first.add_argument("--rank", type=at_least(1), default=64, help="of a readout (default 64)")
    first.add_argument("--steps", type=at_least(1), default=120, help="optimizer steps (default 120)")
    first.add_argument("--batch", type=at_least(1), default=4, help="training samples of a step (default 4)")
    first.add_argument("--rate", type=float, default=2e-3, help="learning rate at the start (default 0.002)")
    second.add_argument("--history", type=int, metavar="K", help="tokens before the new anchor (default B/2 − 2)")
    second.add_argument("--overwrite", action="store_true", help="start anew, whatever --out holds")
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    options = parser().parse_args(argv)
    try:
        with signals_as_exceptions():
            text = options.run(options)
    except (ValueError, OSError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as received:
        print(f"stopped by {received}", file=sys.stderr)
        return 128 + received.signum
    print(text)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
