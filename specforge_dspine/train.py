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
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from specforge.training import Trainer

from specforge_dspine.export import export_run
from specforge_dspine.formats.config_json import LAYOUTS, refuse_unservable
from specforge_dspine.training.capture_source import stream_folder
from specforge_dspine.training.distributed import on_every_rank, process_group
from specforge_dspine.training.plan import make_plan
from specforge_dspine.training.plan_parts import StreamPlan
from specforge_dspine.training.producer import Producer, connect_servers
from specforge_dspine.training.recipe import Recipe, as_recipe_error, load_recipe
from specforge_dspine.training.resume_contract import refuse_changes
from specforge_dspine.training.run_checkpoints import checkpoint_step
from specforge_dspine.training.run_dir import check_run_dir, exclusive, initialize_run_dir, restore_best
from specforge_dspine.training.run_logger import RunLogger
from specforge_dspine.training.specforge_internals import build_model_bundle
from specforge_dspine.training.trainers import RankRun, offline_trainer, streamed_trainer
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import CheckpointError, RecipeError, RunError
from specforge_dspine.utils.files import write_json

logger = logging.getLogger(__name__)


def build(make_trainer: Callable[[RankRun], Trainer], run: RankRun, recipe: Recipe) -> Trainer:
    """Build the trainer; once it has accepted the checkpoint, the run's folder is this run's.

    Raises:
        RecipeError: the checkpoint belongs to another run.
    """
    # SpecForge refuses a checkpoint of another run with a ValueError.
    with as_recipe_error("--resume") if run.resume_from is not None else contextlib.nullcontext():
        trainer = make_trainer(run)
    on_every_rank(run.rank, lambda: initialize_run_dir(recipe, run.plan.draft_config.to_dict(), run.start_step))
    return trainer


def run_streamed(run: RankRun, recipe: Recipe) -> int:
    """Train from a live server; returns the optimizer steps taken.

    Raises:
        RecipeError: as ``build``.
        RunError: the stream ended before the run did.
        CaptureVerificationError, ManagedServerError, ConnectionError: as ``connect_servers``.
    """
    plan, folder = run.plan, stream_folder(run.plan.run_dir)
    with contextlib.ExitStack() as stack:

        def connect() -> Producer:
            shutil.rmtree(folder, ignore_errors=True)  # leftovers of a killed run
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            return Producer(plan, connect_servers(plan, run.bundle.model.lm_head.weight, stack), run.start_step)

        producers: list[Producer] = []  # of rank 0 alone
        on_every_rank(run.rank, lambda: producers.append(connect()))
        trainer = build(streamed_trainer, run, recipe)
        if not producers:
            return int(trainer.fit())
        producer = producers[0]
        stack.callback(producer.stop)
        producer.start()
        try:
            return int(trainer.fit())
        except Exception as error:
            if producer.error is not None:
                raise RunError(f"the stream ended: {producer.error}") from error
            raise
        finally:
            report = vars(producer.source.state) | {
                "remainder": plan.schedule.remainder,
                "beyond_max_steps": plan.schedule.beyond_max_steps,
            }
            write_json(plan.run_dir / "stream.json", report)
            if report["dropped"]:
                logger.info(
                    "%d records were dropped and replaced: see %s/stream.json", len(report["dropped"]), plan.run_dir
                )


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

        resume_from = on_every_rank(rank, claim)
        if rank == 0:
            logger.info("%s", plan.render())
        bundle = build_model_bundle(plan.specforge_config, algorithm=plan.algorithm)
        if resume_from is not None:
            contract = plan.specforge_contract | bundle.strategy_kwargs.resume_contract
            on_every_rank(rank, lambda: refuse_changes(resume_from, contract))
            on_every_rank(rank, lambda: restore_best(recipe, checkpoint_step(resume_from)))
        run_logger = RunLogger(plan, rank)
        rank_run = RankRun(plan, bundle, run_logger, rank, resume_from)
        try:
            if isinstance(plan.source, StreamPlan):
                steps = run_streamed(rank_run, recipe)
            else:
                steps = int(build(offline_trainer, rank_run, recipe).fit())
        finally:
            run_logger.close()
        on_every_rank(rank, lambda: export_all(recipe))
        return steps


def export_all(recipe: Recipe) -> None:
    """Write the best checkpoint, or the newest, in every layout that can serve this variant, below the run's folder.

    Raises:
        CheckpointError: as ``export_run``.
    """
    for layout in LAYOUTS:
        try:
            refuse_unservable(layout, recipe.dspine)
        except CheckpointError as error:
            logger.info("not exported as %s: %s", layout, error)
            continue
        out = recipe.run_dir / "export" / layout
        export_run(recipe.run_dir, layout, out)
        logger.info("exported: %s", out)


class TrainOptions(Options):
    """A recipe, and what to do with it."""

    recipe: Path = option("YAML file, see recipes/ and docs/recipes.md")
    plan: bool = option("print the resolved run without starting it", default=False)
    resume: bool = option("continue the run in output_dir from its newest complete checkpoint", default=False)
    overrides: tuple[str, ...] = option(
        "override a value of the recipe", default=(), positional=True, metavar="section.key=value"
    )


def train(options: TrainOptions) -> str | None:
    """Do what the command line says; returns the plan's text on rank 0, with ``--plan``.

    Raises:
        RecipeError, RunError, FloatingPointError: as ``run``.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    recipe = load_recipe(options.recipe, options.overrides, world_size=ranks)
    if options.plan:
        plan = make_plan(recipe, ranks=ranks)
        return plan.render() if int(os.environ.get("RANK", "0")) == 0 else None
    run(recipe, resume=options.resume)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(
        Command(TrainOptions, train),
        argv,
        module="specforge_dspine.train",
        doc=__doc__,
        expected=(RecipeError, CheckpointError, FileNotFoundError, ConnectionError),
        advice="rerun with --resume to continue",
        on_failure="Fix the error above, then rerun with --resume.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
