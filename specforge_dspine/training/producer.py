"""Capture producer of rank 0: the servers, and the samples that they stream to the trainer."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from specforge.launch import build_disagg_online_producer
from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel

from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.training import capture_source
from specforge_dspine.training.distributed import on_every_rank
from specforge_dspine.training.plan_parts import Plan, StreamPlan
from specforge_dspine.training.recipe import as_recipe_error
from specforge_dspine.training.run_dir import DELIVERY_LOG
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.versions import VERSION

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32  # at most, of a real sample, to verify a server


def connect_servers(plan: Plan, head: torch.Tensor, stack: contextlib.ExitStack) -> list[SGLangClient]:
    """Start or find the servers, and verify each with the LM head E [V, H]; ``stack`` closes them.

    Raises:
        CaptureVerificationError, ConnectionError, ManagedServerError: what is wrong with a server, and what to do.
    """
    assert isinstance(plan.source, StreamPlan)
    options, urls = plan.source.options, list(plan.source.options.servers)
    if options.managed is not None:
        logger.info("starting the capture server (log: %s/server.log)", plan.run_dir)
        with as_recipe_error("stream.managed"):
            server = ManagedServer(
                plan.target.model_path,
                plan.run_dir,
                plan.target.layers,
                dtype=plan.target.dtype,
                **options.managed.model_dump(),
            )
        stack.enter_context(server)
        urls = [server.url]
    first = plan.source.samples[: plan.schedule.batch_size * 8]
    probe = max((sample.input_ids for sample in first), key=len)[:PROBE_TOKENS]
    clients = []
    for url in urls:
        capture_dir = Path(options.capture_dir) if options.capture_dir else None
        client = SGLangClient(url, capture_dir=capture_dir, timeout_s=options.request_timeout_s)
        stack.enter_context(client)
        client.verify_server(plan.target, head, probe)
        logger.info("capture server verified: %s, plugin %s, records in %s", url, VERSION, client.capture_dir)
        clients.append(client)
    return clients


class Producer:
    """SpecForge's producer on a thread: leases slots to our source until the run's samples are there.

    It captures ``runtime.producer_lease`` samples a call, one call at a time: their order is the plan's.
    ``error`` is what ended it early. ``start_step``: the checkpoint's step, from which the run continues.
    """

    def __init__(self, plan: Plan, clients: list[SGLangClient], start_step: int) -> None:
        assert isinstance(plan.source, StreamPlan)
        per_step, log = plan.schedule.samples_per_step, plan.run_dir / DELIVERY_LOG
        slots = range(start_step * per_step, plan.schedule.steps * per_step)
        self.error: BaseException | None = None
        self.started = False
        self.channel = StreamingRefChannel(str(capture_source.stream_folder(plan.run_dir) / capture_source.CHANNEL))
        self.source = capture_source.CaptureSource(
            clients,
            capture_source.PromptPlan(plan.source.samples, plan.seed),
            capture_source.record_store(plan.run_dir),
            plan.target,
            run_id=plan.run_id,
            max_dropped=plan.source.options.max_dropped,
            log=log,
            state=capture_source.resume_delivery(log, slots.start),
        )
        _workers, self._drive = build_disagg_online_producer(
            algorithm=plan.algorithm,
            prompts=[{"task_id": f"slot-{slot:09d}", "payload": {"slot": slot}} for slot in slots],
            feature_store=self.source.store,
            channel=self.channel,
            run_id=plan.run_id,
            target_hidden_size=plan.target.hidden_size,
            target_vocab_size=plan.target.vocab_size,
            aux_hidden_state_layer_ids=plan.target.layers,
            feature_source=self.source,
            **plan.source.limits,
        )
        self._thread = threading.Thread(target=self._run, name="capture-producer", daemon=True)

    def _run(self) -> None:
        try:
            self._drive(should_stop=self.channel.consumer_stopped)
        except BaseException as error:  # the channel has told the consumer; the run reports this one as the cause
            self.error = error

    def start(self) -> None:
        """Begin to capture."""
        self.started = True
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Tell the producer that nobody consumes any more, and wait a little for its last call.

        Not long: torchrun kills what has not ended 30 seconds after SIGTERM, and the server is still to be stopped.
        """
        if not self.channel.consumer_stopped():
            self.channel.mark_consumer_failed("the run is ending")
        self._thread.join(timeout_s)


@contextlib.contextmanager
def capture_producer(plan: Plan, head: torch.Tensor, start_step: int) -> Iterator[Producer | None]:
    """Connect the servers and yield a producer, to be started, on rank 0; None on the other ranks.

    In the end it writes ``stream.json`` and removes the stream's folder. ``head``: the target's E [V, H].

    Raises:
        RunError: the stream ended before the run did; further errors as ``connect_servers``.
    """
    folder, schedule = capture_source.stream_folder(plan.run_dir), plan.schedule
    producer: Producer | None = None
    with contextlib.ExitStack() as stack:

        def connect() -> None:
            nonlocal producer
            shutil.rmtree(folder, ignore_errors=True)  # leftovers of a killed run
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            producer = Producer(plan, connect_servers(plan, head, stack), start_step)

        on_every_rank(connect)
        try:
            yield producer
        except Exception as error:
            if producer is not None and producer.error is not None:
                raise RunError(f"the stream ended: {producer.error}") from error
            raise
        finally:
            if producer is not None and producer.started:
                producer.stop()
                report = vars(producer.source.state) | {"remainder": schedule.remainder}
                write_json(plan.run_dir / "stream.json", report | {"beyond_max_steps": schedule.beyond_max_steps})
                if dropped := len(report["dropped"]):
                    logger.info("%d records were dropped and replaced: see %s/stream.json", dropped, plan.run_dir)
