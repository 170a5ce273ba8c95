"""Runs that are equal by construction, compared with each other: this needs no reference.

window   one optimizer window as 1 micro-batch of 8, 8 of 1, and 2 ranks × 4: §5's sums under the scope "window"
chunks   the objective over all positions at once, one block at a time, and three
"""

from __future__ import annotations

import threading
from pathlib import Path

from specforge_dspine.curves.compare import Curve, Deviation, agree
from specforge_dspine.curves.runs import EXACT, Spec, read_curve, recipe_of, run_curve, toy_data_in
from specforge_dspine.utils.stages import Stages

ALLOWED = 1e-5  # relative, float32
TIMEOUT_S = 300.0  # of a run in several processes
SHORT = ("training.max_steps=18", "training.total_steps=36")  # past the warm-up, the curriculum and its end


def _split(name: str, batch: int, accumulation: int, ranks: int = 1) -> Spec:
    sizes = (f"training.batch_size={batch}", f"training.accumulation_steps={accumulation}")
    return Spec(name, (*SHORT, "dspine.normalization_scope=window", *sizes), ranks)


GROUPS = {  # every run must agree with the first
    "chunks": tuple(Spec(f"{n}_blocks", (*SHORT, f"training.objective_chunk_blocks={n}")) for n in (0, 1, 3)),
    "window": (_split("1x8", 8, 1), _split("8x1", 1, 8), _split("2_ranks_x4", 1, 4, ranks=2)),
}


def run_ranks(spec: Spec, workdir: Path, toy_data: Path) -> Curve:
    """As ``run_curve``, in ``spec.ranks`` processes; a StageError if they fail or do not end in time."""
    recipe = recipe_of(spec, toy_data, workdir / spec.name)
    path = workdir / f"{spec.name}.yaml"
    workdir.mkdir(parents=True, exist_ok=True)
    recipe.save(path)
    with Stages() as stages:
        timer = threading.Timer(TIMEOUT_S, stages.end)
        timer.start()
        try:
            stages.run(
                "torch.distributed.run",
                *("--standalone", "--nproc_per_node", spec.ranks),
                *("-m", "specforge_dspine.train", "--recipe", path),
                threads=1,
                log=workdir / f"{spec.name}.log",
            )
        finally:
            timer.cancel()
    return read_curve(spec.name, recipe)


def check_group(name: str, workdir: Path) -> list[Deviation]:
    """Train the runs of a group; returns what differs between them, except parts that count micro-batches."""
    toy_data, curves = toy_data_in(workdir), {}
    for spec in GROUPS[name]:
        curve = (run_curve if spec.ranks == 1 else run_ranks)(spec, workdir / name, toy_data)
        parts = {part: values for part, values in curve.parts.items() if part not in EXACT}
        curves[spec.name] = Curve(curve.name, curve.recipe, parts)
    return agree(curves, ALLOWED)
