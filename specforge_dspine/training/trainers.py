"""SpecForge's trainer over offline feature files, or over samples streamed from a server.

Both name their samples ``e<epoch>-<sample>``: the draws of a sample (curriculum.py) are keyed by seed, epoch and
sample, wherever it comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specforge.launch import build_disagg_online_consumer
from specforge.runtime.contracts import SampleRef
from specforge.runtime.control_plane.controller import DataFlowController
from specforge.runtime.control_plane.metadata_store import NoOpMetadataStore, SQLiteMetadataStore
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel
from specforge.training import Trainer
from specforge.training.strategies.base import StepContext
from torch.utils.data import DistributedSampler

from specforge_dspine.streaming.feature_folder import feature_name
from specforge_dspine.training.capture_source import CHANNEL, record_store, stream_folder
from specforge_dspine.training.heldout import HeldoutSamples, evaluate
from specforge_dspine.training.optimizer_window import WindowCore
from specforge_dspine.training.plan_parts import FeaturePlan, Plan
from specforge_dspine.training.run_checkpoints import checkpoint_step
from specforge_dspine.training.specforge_internals import optimizer_factory, train_windows


@dataclass(frozen=True)
class RankRun:
    """A planned run on one rank: SpecForge's models, the logger, and the checkpoint to continue from."""

    plan: Plan
    bundle: Any
    logger: Callable[[dict[str, Any], int], None]
    rank: int
    resume_from: str | None

    @property
    def start_step(self) -> int:
        """Optimizer steps of that checkpoint; 0 without one."""
        return checkpoint_step(self.resume_from)


def trainer_arguments(run: RankRun) -> dict[str, Any]:
    """Return the arguments of SpecForge's trainer that both kinds of run share."""
    plan, schedule = run.plan, run.plan.schedule
    return {
        **vars(plan.trainer),
        "run_id": plan.run_id,
        "output_dir": str(plan.run_dir),
        "batch_size": schedule.batch_size,
        "accumulation_steps": schedule.accumulation_steps,
        "max_steps": schedule.steps,
        "total_steps": schedule.total_steps,
        "optimizer_factory": optimizer_factory(plan.specforge_config),
        "eval_data_factory": tuple,  # SpecForge evaluates if there is one; use_windows replaces what it does then
        "logger": run.logger,
        "strategy_kwargs": run.bundle.strategy_kwargs,
        "resume_from": run.resume_from,
    }


def use_windows(trainer: Trainer, run: RankRun) -> Trainer:
    """Give ``trainer`` exact sums over optimizer windows, and our held-out metrics (``train_windows``)."""
    plan = run.plan
    provider = plan.algorithm.providers.offline_for("text")
    samples = HeldoutSamples(plan.heldout.files if plan.heldout else (), provider, plan.max_length)

    def evaluate_heldout() -> dict[str, float]:
        ctx = StepContext(global_step=trainer.global_step, total_steps=plan.schedule.total_steps)
        return evaluate(trainer.core.strategy, samples, ctx, rank=run.rank, ranks=plan.schedule.ranks)

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


def offline_trainer(run: RankRun) -> Trainer:
    """Build a trainer over the feature files of ``data.hidden_states_path``."""
    plan = run.plan
    assert isinstance(plan.source, FeaturePlan)
    provider = plan.algorithm.providers.offline_for("text")
    refs = provider.build_reader(
        plan.source.folder,
        run_id=plan.run_id,
        ttt_length=plan.specforge_config.training.ttt_length,
        max_len=plan.max_length,
    ).read()

    def refs_for_epoch(epoch: int) -> list[SampleRef]:
        return epoch_refs(refs, epoch, seed=plan.seed, rank=run.rank, ranks=plan.schedule.ranks)

    trainer = Trainer(
        algorithm_name=plan.algorithm.name,
        make_step_strategy=plan.algorithm.providers.step.build,
        controller=DataFlowController(plan.run_id, metadata_store=NoOpMetadataStore(), enable_sample_queue=False),
        store=LocalFeatureStore(plan.run_id),
        ref_source={"refs": refs_for_epoch(0), "refs_for_epoch": refs_for_epoch},
        model=run.bundle.model,
        target_head=None,
        num_epochs=plan.schedule.num_epochs,
        collate_fn=provider.build_collator(),
        per_sample_transform=provider.build_normalizer(plan.max_length),
        durable_ack=False,
        checkpoint_extra={"offline_files": len(refs)},
        **trainer_arguments(run),
    )
    return use_windows(trainer, run)


def streamed_trainer(run: RankRun) -> Trainer:
    """Build SpecForge's online consumer over a folder store; every rank calls it, rank 0 alone opens the ledger.

    A resumed run starts a fresh ledger, with a marker at the checkpoint's step.
    """
    folder = stream_folder(run.plan.run_dir)
    ledger_path = str(folder / "ledger.sqlite")
    if run.rank == 0 and run.resume_from is not None:
        ledger = SQLiteMetadataStore(ledger_path)
        ledger.record_train_ack([], global_step=run.start_step, optimizer_durable=True)
        ledger.close()
    trainer = build_disagg_online_consumer(
        algorithm=run.plan.algorithm,
        feature_store=record_store(run.plan.run_dir),
        channel=StreamingRefChannel(str(folder / CHANNEL)),
        draft_model=run.bundle.model,
        metadata_db_path=ledger_path,
        inbox_dir=str(folder / "inboxes"),
        **trainer_arguments(run),
    )
    return use_windows(trainer, run)
