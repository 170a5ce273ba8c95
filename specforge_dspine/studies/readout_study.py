"""The readout study: readouts fitted on training samples, and measured on held-out ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
from tqdm import tqdm

from specforge_dspine.evaluation.benchmarks import Prompt
from specforge_dspine.studies.inputs import StudyOptions, open_features, open_study, record_of
from specforge_dspine.studies.readout import LayerStates, Readouts, captured_states, count_right, fit, merged
from specforge_dspine.studies.report import PAPER, draw_readout, readout_markdown, write_results
from specforge_dspine.studies.statistics import readout_figures
from specforge_dspine.utils.cli import option

SELECTING = 4  # every fourth held-out prompt selects readouts; the others measure them
STATE = (
    "h_ℓ is layer ℓ's output as the next layer receives it: after the injection, if the draft has one. The draft's "
    "own output is the last layer's state through its norm and the head; refined: with the right predecessor's code."
)


class ReadoutOptions(StudyOptions):
    """Options of the readout study."""

    train: Path = option("captured training samples", metavar="FEATURES")
    train_limit: int | None = option("training samples; default: all", default=None, ge=1)
    rank: int = option("of a readout", default=64, ge=1)
    steps: int = option("optimizer steps", default=120, ge=1)
    batch: int = option("training samples of a step", default=4, ge=1)
    rate: float = option("learning rate of the first step", default=2e-3, gt=0)


def run_readout(options: ReadoutOptions) -> str:
    """Fit and measure the readouts; returns the page that ``--out`` gets too."""
    drafter, target, facts = open_study(options)
    train = open_features(options.train, options.train_limit, target).prompts
    heldout = open_features(options.heldout, options.limit, target).prompts
    if shared := {prompt.name for prompt in train} & {prompt.name for prompt in heldout}:
        raise ValueError(
            f"{len(shared)} samples of {options.heldout} are in {options.train} too; {min(shared)} is one"
        )
    if len(heldout) < 2:
        raise ValueError(f"{options.heldout} gives {len(heldout)} sample: one selects readouts, others measure them")
    selecting, measuring = heldout[::SELECTING], [p for k, p in enumerate(heldout) if k % SELECTING]
    head, layers = drafter.head.detach().float(), len(drafter.draft.layers)
    started = time.monotonic()

    def states(prompt: Prompt, draw: int, *, with_choices: bool = False) -> LayerStates:
        limits = {"anchors": options.anchors, "seed": options.seed}
        name = f"{prompt.name}:{draw}"
        return captured_states(drafter, record_of(prompt), name, **limits, with_choices=with_choices)

    def batches() -> Iterator[LayerStates]:
        generator = torch.Generator().manual_seed(options.seed)
        order = ((epoch, i) for epoch in count() for i in torch.randperm(len(train), generator=generator).tolist())
        while True:
            yield merged([states(train[i], epoch) for epoch, i in islice(order, options.batch)])

    generator = torch.Generator().manual_seed(options.seed)
    readouts = Readouts(layers, head.shape[1], options.rank, generator).to(head.device)
    selection = merged([states(prompt, 0) for prompt in selecting])
    history = fit(readouts, head, batches(), selection, steps=options.steps, rate=options.rate)
    counts = [
        count_right(readouts, head, states(prompt, 0, with_choices=True), drafter.proposals)
        for prompt in tqdm(measuring, desc="measuring", unit=" sample")
    ]
    result = facts | {
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
        **readout_figures(counts, drafter.proposals + 1),
    }
    draw_readout(options.out / "readout.png", result)
    return write_results(options.out, "readout", result, readout_markdown(result))
