"""SpecForge's trainer over offline feature files, or over samples streamed from a server.

Both name their samples ``e<epoch>-<sample>``: the draws of a sample (curriculum.py) are keyed by seed, epoch and
sample, wherever it comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from specforge.launch import build_disagg_online_consumer
from specforge.runtime.contracts import SampleRef
from specforge.runtime.control_plane.controller import DataFlowController
from specforge.runtime.control_plane.metadata_store import NoOpMetadataStore, SQLiteMetadataStore
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel
from specforge.training import Trainer
from specforge.training.assembly import build_model_bundle
from specforge.training.strategies.base import StepContext
from torch.utils.data import DistributedSampler

from specforge_dspine.streaming.feature_folder import feature_name
from specforge_dspine.training.capture_source import CHANNEL, record_store, stream_folder
from specforge_dspine.training.heldout import HeldoutSamples, evaluate
from specforge_dspine.training.optimizer_window import WindowCore
from specforge_dspine.training.plan_parts import FeaturePlan, Plan
from specforge_dspine.training.recipe import as_recipe_error
from specforge_dspine.training.specforge_internals import optimizer_factory, train_windows

Logger = Callable[[dict[str, Any], int], None]


def build_models(plan: Plan) -> Any:
    """Build target tables, draft and objective: SpecForge's model bundle."""
    return build_model_bundle(plan.specforge_config, algorithm=plan.algorithm)


def build_trainer(
    plan: Plan, bundle: Any, logger: Logger, rank: int, resume_from: str | None, start_step: int
) -> Trainer:
    """Build SpecForge's trainer of ``bundle``, with exact sums over optimizer windows and our held-out metrics.

    Every rank calls it. ``start_step``: optimizer steps of the checkpoint ``resume_from``; 0 without one.
    """
    schedule = plan.schedule
    arguments = {
        **vars(plan.trainer),
        "run_id": plan.run_id,
        "output_dir": str(plan.run_dir),
        "batch_size": schedule.batch_size,
        "accumulation_steps": schedule.accumulation_steps,
        "max_steps": schedule.steps,
        "total_steps": schedule.total_steps,
        "optimizer_factory": optimizer_factory(plan.specforge_config),
        "eval_data_factory": tuple,  # makes SpecForge evaluate; train_windows replaces what it does then
        "logger": logger,
        "strategy_kwargs": bundle.strategy_kwargs,
        "resume_from": resume_from,
    }
    # SpecForge refuses a checkpoint of another run with a ValueError.
    with as_recipe_error("--resume") if resume_from is not None else contextlib.nullcontext():
        if isinstance(plan.source, FeaturePlan):
            trainer = offline_trainer(plan, plan.source.folder, bundle.model, rank, arguments)
        else:
            trainer = streamed_trainer(plan, bundle.model, rank, start_step, arguments)
    provider = plan.algorithm.providers.offline_for("text")
    samples = HeldoutSamples(plan.heldout.files if plan.heldout else (), provider, plan.max_length)

    def evaluate_heldout() -> dict[str, float]:
        ctx = StepContext(global_step=trainer.global_step, total_steps=schedule.total_steps)
        return evaluate(trainer.core.strategy, samples, ctx, rank=rank, ranks=schedule.ranks)

    train_windows(trainer, WindowCore, evaluate_heldout)
    return trainer


def epoch_refs(refs: list[SampleRef], epoch: int, *, seed: int, rank: int, ranks: int) -> list[SampleRef]:
    """Return this rank's part of one epoch, shuffled by (seed, epoch), each ref named for its epoch and file."""
    sampler: DistributedSampler[SampleRef] = DistributedSampler(
        refs,  # type: ignore[arg-type]  # only its length is used
        num_replicas=ranks,
        rank=rank,
        seed=seed,
        shuffle=True,
    )
    sampler.set_epoch(epoch)
    picked = [refs[index] for index in sampler]
    return [
        dataclasses.replace(ref, sample_id=f"e{epoch:04d}-{feature_name(ref.feature_store_uri)}") for ref in picked
    ]


def offline_trainer(plan: Plan, folder: str, model: Any, rank: int, arguments: dict[str, Any]) -> Trainer:
    """Build a trainer over the feature files in ``folder``."""
    provider = plan.algorithm.providers.offline_for("text")
    refs = provider.build_reader(
        folder,
        run_id=plan.run_id,
        ttt_length=7,  # SpecForge's default, of other algorithms
        max_len=plan.max_length,
    ).read()

    def refs_for_epoch(epoch: int) -> list[SampleRef]:
        return epoch_refs(refs, epoch, seed=plan.seed, rank=rank, ranks=plan.schedule.ranks)

    return Trainer(
        algorithm_name=plan.algorithm.name,
        make_step_strategy=plan.algorithm.providers.step.build,
        controller=DataFlowController(plan.run_id, metadata_store=NoOpMetadataStore(), enable_sample_queue=False),
        store=LocalFeatureStore(plan.run_id),
        ref_source={"refs": refs_for_epoch(0), "refs_for_epoch": refs_for_epoch},
        model=model,
        target_head=None,
        num_epochs=plan.schedule.num_epochs,
        collate_fn=provider.build_collator(),
        per_sample_transform=provider.build_normalizer(plan.max_length),
        durable_ack=False,
        checkpoint_extra={"offline_files": len(refs)},
        **arguments,
    )


def streamed_trainer(plan: Plan, model: Any, rank: int, start_step: int, arguments: dict[str, Any]) -> Trainer:
    """Build SpecForge's online consumer over a folder store; rank 0 alone opens the ledger.

    A resumed run starts a new ledger, with a marker at the checkpoint's ``start_step``.
    """
    folder = stream_folder(plan.run_dir)
    ledger_path = str(folder / "ledger.sqlite")
    if rank == 0 and arguments["resume_from"] is not None:
        ledger = SQLiteMetadataStore(ledger_path)
        ledger.record_train_ack([], global_step=start_step, optimizer_durable=True)
        ledger.close()
    return build_disagg_online_consumer(
        algorithm=plan.algorithm,
        feature_store=record_store(plan.run_dir),
        channel=StreamingRefChannel(str(folder / CHANNEL)),
        draft_model=model,
        metadata_db_path=ledger_path,
        inbox_dir=str(folder / "inboxes"),
        **arguments,
    )
