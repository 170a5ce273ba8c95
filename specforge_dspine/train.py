"""Train a DSpine draft from a recipe (docs/recipes.md).

    python -m specforge_dspine.train --recipe recipes/smollm2_cpu.yaml [--plan] [--resume] [section.key=value ..]
    torchrun --nproc_per_node 7 -m specforge_dspine.train --recipe recipes/qwen3_8b.yaml

Recipe → plan → stream → trainer → checkpoints → export. Rank 0 owns the capture server (``stream.managed``) and the
producer; every rank trains. A folder that holds a run is continued only with ``--resume``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from pathlib import Path

from specforge_dspine.export import export_run
from specforge_dspine.formats.config_json import LAYOUTS, refuse_unservable
from specforge_dspine.training.distributed import on_every_rank, process_group
from specforge_dspine.training.plan import make_plan
from specforge_dspine.training.plan_parts import FeaturePlan
from specforge_dspine.training.producer import capture_producer
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.training.resume_contract import refuse_changes
from specforge_dspine.training.run_checkpoints import checkpoint_step
from specforge_dspine.training.run_dir import check_run_dir, exclusive, holds_run, initialize_run_dir, restore_best
from specforge_dspine.training.run_logger import RunLogger
from specforge_dspine.training.trainers import build_models, build_trainer
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import CheckpointError, RecipeError

logger = logging.getLogger(__name__)


def run(recipe: Recipe, *, resume: bool) -> int:
    """Train and export; returns the optimizer steps taken. Under torchrun every rank calls it.

    Raises:
        RecipeError: the recipe cannot be run, or the folder not be used.
        RunError, FloatingPointError: the run cannot go on.
    """
    plan = make_plan(recipe, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(
            process_group(fsdp_sharding=plan.fsdp_sharding, seed=plan.seed, timeout_minutes=plan.dist_timeout)
        )

        def claim() -> str | None:
            stack.enter_context(exclusive(recipe.run_dir))
            return check_run_dir(recipe, resume=resume)

        resume_from = on_every_rank(claim)
        start_step = on_every_rank(lambda: checkpoint_step(resume_from))
        if rank == 0:
            logger.info("%s", plan.render())
        bundle = build_models(plan)
        if resume_from is not None:
            contract = plan.specforge_contract | bundle.strategy_kwargs.resume_contract
            on_every_rank(lambda: refuse_changes(resume_from, contract))
            on_every_rank(lambda: restore_best(recipe, start_step))
        metrics = RunLogger(plan, rank)
        stack.callback(metrics.close)
        with (
            contextlib.nullcontext()
            if isinstance(plan.source, FeaturePlan)
            else capture_producer(plan, bundle.model.lm_head.weight, start_step) as producer
        ):
            trainer = build_trainer(plan, bundle, metrics, rank, resume_from, start_step)
            on_every_rank(lambda: initialize_run_dir(recipe, plan.draft_config.to_dict(), start_step))
            if producer is not None:
                producer.start()
            steps = int(trainer.fit())
        on_every_rank(lambda: export_all(recipe))
        return steps


def export_all(recipe: Recipe) -> None:
    """Export the best checkpoint, or the newest, in every layout that can serve this variant."""
    for layout in LAYOUTS:
        try:
            refuse_unservable(layout, recipe.dspine)
        except CheckpointError as error:
            logger.info("not exported as %s: %s", layout, error)
            continue
        out = recipe.run_dir / "export" / layout
        checkpoint = export_run(recipe.run_dir, layout, out)
        logger.info("exported: %s (checkpoint: %s)", out, checkpoint)


class TrainOptions(Options):
    """A recipe, and what to do with it."""

    recipe: Path = option("YAML file, see recipes/ and docs/recipes.md")
    plan: bool = option("print the resolved run without starting it", default=False)
    print_recipe: bool = option("print the recipe with every default filled in, and end", default=False)
    resume: bool = option("continue the run in output_dir from its newest complete checkpoint", default=False)
    overrides: tuple[str, ...] = option(
        "override a value of the recipe", default=(), positional=True, metavar="section.key=value"
    )


def train(options: TrainOptions) -> str | None:
    """Do what the command line says; returns what ``--plan`` or ``--print-recipe`` print on rank 0."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    recipe = load_recipe(options.recipe, options.overrides, world_size=ranks)
    if options.print_recipe:
        return str(recipe) if int(os.environ.get("RANK", "0")) == 0 else None
    if options.plan:
        plan = make_plan(recipe, ranks=ranks)
        return plan.render() if int(os.environ.get("RANK", "0")) == 0 else None
    run(recipe, resume=options.resume)
    return None


def next_step(options: TrainOptions) -> str:
    """Say how a run that ended early continues: with ``--resume`` once it took a step."""
    with contextlib.suppress(RecipeError):
        if holds_run(load_recipe(options.recipe, options.overrides).run_dir):
            return "rerun with --resume to continue"
    return "run the same command again"


main = partial(
    run_command,
    Command(TrainOptions, train),
    module="specforge_dspine.train",
    doc=__doc__,
    expected=(RecipeError, CheckpointError, FileNotFoundError, ConnectionError),
    advice=next_step,
)

if __name__ == "__main__":
    raise SystemExit(main())
