"""Studies of a draft's layers: what each layer knows, and when it needs to know the previous tokens.

    python -m specforge_dspine.studies readout --draft DIR --target DIR --train FEATURES --heldout FEATURES --out DIR
        [--rank 64] [--steps N] [--batch N] [--rate R] [--anchors N] [--limit N] [--train-limit N] [--seed N]
    python -m specforge_dspine.studies timing --draft DIR --target DIR --heldout FEATURES --out DIR
        [--history K] [--anchors N] [--limit N] [--seed N] [--overwrite]

``--draft``: an export of either layout, or a third-party DFlash draft. FEATURES: folders of specforge_dspine.capture,
with the target's greedy responses and its states over them.

``readout`` fits a low-rank readout to every layer on the training samples, and counts how often its first choice is
right on the held-out ones: readout.json, .md, .png. ``timing`` runs the timing and predecessor interventions:
timing.json, timing.md, timing.png, predecessor.png, and timing.jsonl with the results of every prompt. The same
command continues a stopped timing study. Fields: docs/studies.md.
"""

from __future__ import annotations

from functools import partial

from specforge_dspine.streaming.record import RecordError
from specforge_dspine.studies.readout_study import ReadoutOptions, run_readout
from specforge_dspine.studies.timing_study import TimingOptions, run_timing
from specforge_dspine.utils.cli import Command, run_command

COMMANDS = {
    "readout": Command(ReadoutOptions, run_readout, "what can be read from every layer"),
    "timing": Command(TimingOptions, run_timing, "the value of right history and predecessors, layer by layer"),
}


main = partial(
    run_command, COMMANDS, module="specforge_dspine.studies", doc=__doc__, expected=(ValueError, OSError, RecordError)
)

if __name__ == "__main__":
    raise SystemExit(main())
