"""SpecForge's trainer over either feed: offline feature files, or refs streamed from a server.

Both feeds name their samples ``e<epoch>-<sample>``, so that a sample's draws (curriculum.py) are keyed by seed,
epoch and sample whatever brought it here.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specforge.launch import build_disagg_online_consumer, build_disagg_online_producer
from specforge.runtime.contracts import SampleRef
from specforge.runtime.control_plane.controller import DataFlowController
from specforge.runtime.control_plane.metadata_store import NoOpMetadataStore, SQLiteMetadataStore
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel
from specforge.training import Trainer
from specforge.training.strategies.base import StepContext
from torch.utils.data import DistributedSampler

from specforge_dspine.training.capture_source import CaptureSource, SpoolStore
from specforge_dspine.training.heldout import HeldoutSamples, evaluate
from specforge_dspine.training.optimizer_window import WindowCore
from specforge_dspine.training.plan import Plan
from specforge_dspine.training.specforge_internals import optimizer_factory, train_windows

Logger = Callable[[dict[str, Any], int], None]


def common_options(plan: Plan, bundle: Any, logger: Logger) -> dict[str, Any]:
    """What both feeds hand to SpecForge's trainer."""
    host, training = plan.recipe.host, plan.recipe.host.training
    workers = host.data.dataloader_num_workers
    default = plan.algorithm.providers.model.default_dataloader_num_workers
    return {
        "optimizer_factory": optimizer_factory(host),
        "run_id": host.run_id,
        "output_dir": host.output_dir,
        "batch_size": training.batch_size,
        "accumulation_steps": training.accumulation_steps,
        "max_steps": plan.steps,
        "total_steps": plan.total_steps,
        "save_interval": training.save_interval,
        "max_checkpoints": training.max_checkpoints,
        "eval_interval": plan.recipe.heldout.interval if plan.recipe.heldout is not None else 0,
        "eval_data_factory": tuple,  # that there is one makes SpecForge evaluate; with_windows says what that does
        "logger": logger,
        "log_interval": training.log_interval,
        "strategy_kwargs": bundle.strategy_kwargs,
        "dataloader_num_workers": default if workers is None else workers,
    }


def with_windows(trainer: Trainer, plan: Plan, rank: int) -> Trainer:
    """``trainer`` with exact sums over its optimizer windows, and with our held-out metrics (host.train_windows)."""
    provider = plan.algorithm.providers.offline_for("text")
    samples = HeldoutSamples(plan.heldout_files, provider, plan.recipe.host.data.max_length)

    def evaluate_heldout() -> dict[str, float]:
        ctx = StepContext(global_step=trainer.global_step, total_steps=plan.total_steps)
        return evaluate(trainer.core.strategy, samples, ctx, rank=rank, ranks=plan.ranks)

    train_windows(trainer, WindowCore, evaluate_heldout)
    return trainer


def epoch_refs(refs: list[SampleRef], epoch: int, *, seed: int, rank: int, ranks: int) -> list[SampleRef]:
    """This rank's share of one epoch, shuffled by (seed, epoch), each ref named for its epoch and file."""
    sampler: DistributedSampler[SampleRef] = DistributedSampler(
        refs,  # type: ignore[arg-type]  # only its length is used
        num_replicas=ranks,
        rank=rank,
        seed=seed,
        shuffle=True,
    )
    sampler.set_epoch(epoch)
    named = []
    for index in sampler:
        ref = refs[index]
        stem = Path(ref.feature_store_uri.removeprefix("file://")).name.split(".ckpt")[0]
        named.append(dataclasses.replace(ref, sample_id=f"e{epoch:04d}-{stem}"))
    return named


def offline_trainer(plan: Plan, bundle: Any, logger: Logger, *, rank: int, resume_from: str | None) -> Trainer:
    """A trainer over the feature files of ``data.hidden_states_path``."""
    host, training = plan.recipe.host, plan.recipe.host.training
    provider = plan.algorithm.providers.offline_for("text")
    source = provider.build_reader(
        host.data.hidden_states_path,
        run_id=host.run_id,
        ttt_length=training.ttt_length,
        max_len=host.data.max_length,
    ).read()

    def refs_for_epoch(epoch: int) -> list[SampleRef]:
        return epoch_refs(source, epoch, seed=training.seed, rank=rank, ranks=plan.ranks)

    trainer = Trainer(
        algorithm_name=plan.algorithm.name,
        make_step_strategy=plan.algorithm.providers.step.build,
        controller=DataFlowController(host.run_id, metadata_store=NoOpMetadataStore(), enable_sample_queue=False),
        store=LocalFeatureStore(host.run_id),
        ref_source={"refs": refs_for_epoch(0), "refs_for_epoch": refs_for_epoch},
        model=bundle.model,
        target_head=None,
        num_epochs=training.num_epochs,
        collate_fn=provider.build_collator(),
        per_sample_transform=provider.build_normalizer(host.data.max_length),
        durable_ack=False,
        resume_from=resume_from,
        checkpoint_extra={"offline_files": len(source)},
        **common_options(plan, bundle, logger),
    )
    return with_windows(trainer, plan, rank)


def stream_paths(run_dir: Path) -> dict[str, Path]:
    """Control files of the stream. A resumed run opens a new channel, ledger and store: all of it is transient."""
    base = run_dir / "stream"
    return {"base": base, "channel": base / "refs.jsonl", "ledger": base / "ledger.sqlite"}


def record_store(run_dir: Path) -> SpoolStore:
    """The directory where captured records wait for their step; deleted once the optimizer has taken it."""
    return SpoolStore(str(stream_paths(run_dir)["base"]), store_id="records", retain_on_release=True)


def streamed_trainer(
    plan: Plan,
    bundle: Any,
    logger: Logger,
    *,
    rank: int,
    paths: dict[str, Path],
    resume_from: str | None,
    start_step: int,
) -> Trainer:
    """SpecForge's online consumer over a directory store; every rank calls it, rank 0 alone opens the ledger: the
    others wait for it inside.

    A resumed run starts a fresh ledger whose durable marker says ``start_step``, the checkpoint's step.
    """
    if rank == 0 and resume_from is not None:
        ledger = SQLiteMetadataStore(str(paths["ledger"]))
        ledger.record_train_ack([], global_step=start_step, optimizer_durable=True)
        ledger.close()
    trainer = build_disagg_online_consumer(
        algorithm=plan.algorithm,
        feature_store=record_store(plan.recipe.run_dir),
        channel=StreamingRefChannel(str(paths["channel"])),
        draft_model=bundle.model,
        metadata_db_path=str(paths["ledger"]),
        inbox_dir=str(paths["base"] / "inboxes"),
        resume_from=resume_from,
        **common_options(plan, bundle, logger),
    )
    return with_windows(trainer, plan, rank)


class Producer:
    """SpecForge's producer on a thread of rank 0: leases slots to our source until the run's samples are there.

    Captures go ``runtime.producer_lease`` at a time, one call at a time: the order of samples is the plan's.
    """

    def __init__(self, plan: Plan, source: CaptureSource, channel_path: Path, slots: range) -> None:
        host = plan.recipe.host
        self.channel = StreamingRefChannel(str(channel_path))
        self.error: BaseException | None = None
        _workers, self._drive = build_disagg_online_producer(
            algorithm=plan.algorithm,
            prompts=[{"task_id": f"slot-{slot:09d}", "payload": {"slot": slot}} for slot in slots],
            feature_store=source.store,
            channel=self.channel,
            run_id=host.run_id,
            target_hidden_size=plan.target.hidden_size,
            target_vocab_size=plan.target.vocab_size,
            aux_hidden_state_layer_ids=plan.target.layers,
            feature_source=source,
            lease=host.runtime.producer_lease,
            in_flight_high_watermark=host.runtime.in_flight_high_watermark,
            in_flight_low_watermark=host.runtime.in_flight_low_watermark,
            resident_high_watermark_bytes=host.runtime.resident_high_watermark_bytes,
            resident_low_watermark_bytes=host.runtime.resident_low_watermark_bytes,
            feature_store_max_resident_bytes=host.runtime.feature_store_max_resident_bytes,
        )
        self._thread = threading.Thread(target=self._run, name="capture-producer", daemon=True)

    def _run(self) -> None:
        try:
            self._drive(should_stop=self.channel.consumer_stopped)
        except BaseException as error:  # the channel has told the consumer; the run reports this one as the cause
            self.error = error

    def start(self) -> None:
        """Begin to capture."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Tell the producer that nobody consumes any more, and wait a little for its last call.

        Not long: torchrun kills what has not ended 30 seconds after SIGTERM, and the server is still to be stopped.
        """
        if not self.channel.consumer_stopped():
            self.channel.mark_consumer_failed("the run is ending")
        self._thread.join(timeout_s)
