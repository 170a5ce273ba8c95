"""Runs that are equal by construction, held against each other: no reference is needed to know that they must agree.

window   one optimizer window as 1 micro-batch of 8, 8 of 1, and 2 ranks × 4: §5's sums under the scope "window"
chunks   the objective over all rows at once, one block at a time, and three
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from specforge_dspine.curves.compare import Curve, Deviation, agree
from specforge_dspine.curves.runs import EXACT, CurvesError, Spec, read_curve, recipe_of, run_curve, world_in

ALLOWED = 1e-5  # relative, float32
TIMEOUT_S = 300.0

SHORT = ("training.max_steps=18", "training.total_steps=36")  # past the warm-up, the curriculum and its end
WINDOW = (*SHORT, "dspine.normalization_scope=window")


@dataclass(frozen=True)
class Group:
    """Runs that must agree with the first of them."""

    name: str
    members: tuple[Spec, ...]


def _split(name: str, batch: int, accumulation: int, ranks: int = 1) -> Spec:
    sizes = (f"training.batch_size={batch}", f"training.accumulation_steps={accumulation}")
    return Spec(name, (*WINDOW, *sizes), ranks)


GROUPS = {
    group.name: group
    for group in (
        Group(
            "chunks", tuple(Spec(f"{n}_blocks", (*SHORT, f"training.objective_chunk_blocks={n}")) for n in (0, 1, 3))
        ),
        Group("window", (_split("1x8", 8, 1), _split("8x1", 1, 8), _split("2_ranks_x4", 1, 4, ranks=2))),
    )
}


def run_ranks(spec: Spec, workdir: Path, world: Path | None = None) -> Curve:
    """As ``run_curve``, in ``spec.ranks`` processes.

    Raises:
        CurvesError: the run failed or hung, with the end of what it wrote.
    """
    world = world or world_in(workdir)
    run_dir = workdir / spec.name
    recipe = recipe_of(spec, world, run_dir)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / f"{spec.name}.yaml"
    recipe.save(path)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(spec.ranks)),
            *("-m", "specforge_dspine.train", "--recipe", str(path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # so that the ranks end with their launcher
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CurvesError(f"{spec.name}: {spec.ranks} ranks hung for {TIMEOUT_S:g} s") from error
        raise
    if process.returncode != 0:
        raise CurvesError(f"{spec.name}: {spec.ranks} ranks failed:\n{output[-3000:]}")
    return read_curve(spec.name, recipe)


def run_group(group: Group, workdir: Path) -> dict[str, Curve]:
    """The group's curves, without the parts that count micro-batches.

    Raises:
        CurvesError: as ``run_ranks``; RecipeError and so on as ``run_curve``.
    """
    world = world_in(workdir)
    curves = {}
    for spec in group.members:
        curve = (run_curve if spec.ranks == 1 else run_ranks)(spec, workdir / group.name, world)
        parts = {part: values for part, values in curve.parts.items() if part not in EXACT}
        curves[spec.name] = Curve(curve.name, curve.recipe, parts)
    return curves


def check_group(group: Group, workdir: Path) -> list[Deviation]:
    """Train the group's runs and print whether they agree; returns what does not.

    Raises:
        CurvesError, RecipeError: as ``run_group``.
    """
    deviations = agree(run_group(group, workdir), ALLOWED)
    print(f"{'OFF ' if deviations else 'ok  '} {group.name}: {', '.join(spec.name for spec in group.members)}")
    for deviation in deviations:
        print(f"       {deviation}")
    return deviations
