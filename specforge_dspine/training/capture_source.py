"""Capture source of a streamed run: the order of its samples, and their records as SpecForge's refs.

A run needs steps × global batch samples. SpecForge's producer gets that many numbered slots; this source fills each
with the next sample of an endless, seeded order. A bad record is dropped, counted and named, and the next sample
takes its place, so that the run reaches its planned steps. Delivered is the planned order without the bad samples,
however it is leased, stopped and resumed. ``delivered.jsonl`` logs each delivery.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from specforge.data.loss_mask import has_consecutive_supervised_tokens
from specforge.data.prompt_builder import prepare_prompt_tasks
from specforge.inference.capture import CaptureConfig
from specforge.runtime.contracts import FeatureSpec, PromptTask, SampleRef
from specforge.runtime.data_plane.disaggregated import SharedDirFeatureStore

from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import RecordError, Sample, SampleNames, TargetIdentity
from specforge_dspine.training.recipe import ALGORITHM
from specforge_dspine.utils.errors import RecipeError, RunError
from specforge_dspine.utils.files import looked_in

logger = logging.getLogger(__name__)

CHANNEL = "refs.jsonl"  # in the stream's folder, from producer to trainer


def read_samples(path: str, *, max_length: int, max_prompts: int | None = None) -> list[Sample]:
    """Read the samples of a tokenized JSONL file that supervise two consecutive tokens, cut to ``max_length`` tokens.

    Raises:
        RecipeError: the file is missing, empty, or holds conversations instead of token ids.
        ValueError: a malformed line, with its number (SpecForge's reader).
    """
    if not os.path.isfile(path):
        raise RecipeError(f"data.prompts_path={path!r}: no such file{looked_in(path)}; data_prep.tokenize writes one")
    with open(path, encoding="utf-8") as stream:
        start = stream.read(1 << 16)
    if '"input_ids"' not in start:
        raise RecipeError(
            f"data.prompts_path={path!r} holds no token ids: DSpine learns from the target's own responses; "
            "write such a file with python -m data_prep.regenerate and then data_prep.tokenize"
        )
    tasks = prepare_prompt_tasks(
        path,
        None,
        chat_template=None,
        max_length=max_length,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
        min_loss_tokens=2,
        max_prompts=max_prompts,
        loss_mask_filter=has_consecutive_supervised_tokens,
    )
    names = SampleNames()
    lists = ((task["payload"]["input_ids"], task["payload"]["loss_mask"]) for task in tasks)
    samples = [Sample(names.next(ids, mask), ids, mask) for ids, mask in lists]
    if not samples:
        raise RecipeError(f"data.prompts_path={path!r}: no sample has two consecutive supervised tokens")
    return samples


class PromptPlan:
    """Endless, reproducible order of samples: every epoch is a new permutation keyed by (seed, epoch)."""

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._epoch, self._order = -1, torch.empty(0)

    def __getitem__(self, index: int) -> Sample:
        """The sample at plan position ``index``; its name carries the epoch: ``e0003-<name>``."""
        epoch, place = divmod(index, len(self.samples))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.samples), generator=generator)
        sample = self.samples[int(self._order[place])]
        return Sample(f"e{epoch:04d}-{sample.name}", sample.input_ids, sample.loss_mask)


class RecordStore(SharedDirFeatureStore):
    """SpecForge's shared-directory store, which takes over a captured file by renaming it."""

    def take_over(self, record: Path, sample: Sample, target: TargetIdentity, run_id: str, slot: str) -> SampleRef:
        """Move ``record`` into the store and return its ref: [S], [S], [1, S, T·H], [1, S, H]."""
        length, hidden = len(sample.input_ids), target.hidden_size
        shapes = {
            "input_ids": ((length,), "int64"),
            "loss_mask": ((length,), "int64"),
            "hidden_states": ((1, length, len(target.layers) * hidden), target.dtype),
            "target_last_hidden_states": ((1, length, hidden), target.dtype),
        }
        size = record.stat().st_size
        # The store's names are {sample}.g{generation}.ckpt. A server by hand may capture on another file system.
        shutil.move(record, Path(self.root) / f"{sample.name}.g1.ckpt")
        return SampleRef(
            sample_id=sample.name,
            run_id=run_id,
            source_task_id=slot,
            feature_store_uri=f"disagg://{self.store_id}/{sample.name}",
            feature_keys={name: f"{sample.name}/{name}" for name in shapes},
            feature_specs={n: FeatureSpec(name=n, shape=s, dtype=f"torch.{d}") for n, (s, d) in shapes.items()},
            strategy=ALGORITHM,
            target_model_version=target.model_path,
            num_tokens=length,
            estimated_bytes=size,
            metadata={"target_repr": "hidden_state", "generation": 1},
        )


def stream_folder(run_dir: Path) -> Path:
    """Return the folder of the stream's transient files: records, channel, ledger. A resumed run opens new ones."""
    return run_dir / "stream"


def record_store(run_dir: Path) -> RecordStore:
    """Open the store where records wait for their step; the optimizer's step deletes them."""
    return RecordStore(str(stream_folder(run_dir)), store_id="records", retain_on_release=True)


@dataclass
class Delivery:
    """State of the stream, in samples and in positions of the plan."""

    delivered: int = 0  # samples
    pending: list[int] = field(default_factory=list)  # delivered after the checkpoint of a resume: they come again
    next: int = 0  # position
    dropped: list[str] = field(default_factory=list)  # bad records, with their reasons

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` plan positions."""
        again, self.pending = self.pending[:count], self.pending[count:]
        fresh = range(self.next, self.next + count - len(again))
        self.next = fresh.stop
        return [*again, *fresh]


def resume_delivery(path: Path, consumed: int) -> Delivery:
    """Restore the stream's state after the first ``consumed`` samples from ``delivered.jsonl``.

    The log only grows. A sample delivered after the checkpoint is delivered again under the same number; of equal
    numbers the last line counts. A capture that a kill cut short has logged its bad records, but no delivery: all of
    its samples are requested again.
    """
    entries = []
    for line in path.read_text(encoding="utf-8").strip().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # a kill may have cut a line
            entries.append(json.loads(line))
    places = {entry["number"]: entry["position"] for entry in entries if "number" in entry}
    if any(number not in places for number in range(consumed)):
        raise RecipeError(f"{path}: {len(places)} delivered samples are logged, the checkpoint used {consumed}")
    return Delivery(
        delivered=consumed,
        pending=[places[number] for number in sorted(places) if number >= consumed],
        next=max((entry["next"] for entry in entries if "number" in entry), default=0),
        dropped=list(dict.fromkeys(entry["dropped"] for entry in entries if "dropped" in entry)),
    )


@dataclass
class CaptureSource:
    """SpecForge's ref source over one or several servers; one call at a time, results in the order of slots."""

    clients: list[SGLangClient]  # those that still respond
    plan: PromptPlan
    store: RecordStore
    target: TargetIdentity
    run_id: str
    max_dropped: int
    log: Path
    state: Delivery

    def produce_refs(self, tasks: list[PromptTask], *, capture: CaptureConfig) -> list[SampleRef]:
        """Return one ref per slot of ``tasks``, in their order.

        Raises:
            RunError: more than ``max_dropped`` records were bad.
            ConnectionError: no server responds any more.
        """
        refs: list[SampleRef] = []
        entries: list[dict[str, Any]] = []
        while len(refs) < len(tasks):
            taken = self.state.take(len(tasks) - len(refs))
            samples = [self.plan[position] for position in taken]
            for position, sample, result in zip(taken, samples, self._capture(samples), strict=True):
                if isinstance(result, RecordError):
                    self._drop(result)
                    continue
                slot, number = tasks[len(refs)].task_id, self.state.delivered + len(refs)
                refs.append(self.store.take_over(result, sample, self.target, self.run_id, slot))
                entries.append({"number": number, "sample": sample.name, "position": position})
        self._append([entry | {"next": self.state.next} for entry in entries])  # before the refs are published
        self.state.delivered += len(refs)
        return refs

    def _capture(self, samples: list[Sample]) -> list[Path | RecordError]:
        """Spread ``samples`` over the servers; the others take over from a server that fails."""
        clients, count = self.clients, len(self.clients)
        with ThreadPoolExecutor(count) as pool:
            futures = [
                pool.submit(client.capture, samples[i::count], self.target) for i, client in enumerate(clients)
            ]
        results: list[Path | RecordError] = [RecordError("", "not captured")] * len(samples)
        for index, future in enumerate(futures):
            try:
                results[index::count] = future.result()
            except ConnectionError as error:
                logger.error("capture server lost: %s", error)
                self.clients = [client for client in self.clients if client is not clients[index]]
        if len(self.clients) == count:
            return results
        for result in results:
            if isinstance(result, Path):
                result.unlink(missing_ok=True)
        if not self.clients:
            raise ConnectionError("no capture server responds any more; see the server's log and use --resume")
        return self._capture(samples)

    def _drop(self, error: RecordError) -> None:
        if str(error) in self.state.dropped:
            return  # requested again after a resume, and already counted
        self.state.dropped.append(str(error))
        logger.warning("dropped record %d: %s", len(self.state.dropped), error)
        self._append([{"dropped": str(error)}])
        if len(self.state.dropped) > self.max_dropped:
            raise RunError(
                f"{len(self.state.dropped)} bad records, stream.max_dropped={self.max_dropped}; the last: {error}"
            )

    def _append(self, entries: list[dict[str, Any]]) -> None:
        with open(self.log, "a", encoding="utf-8") as stream:
            stream.writelines(f"\n{json.dumps(entry)}" for entry in entries)  # break first: the last line may be cut
