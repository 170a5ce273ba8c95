"""Write SpecForge's offline features: one record per training sample, captured by the streaming plugin.

    python -m specforge_dspine.capture --target DIR --samples FILE.jsonl --layers 1,9,17 --out DIR
        [--server URL | --device cpu|0|0,1] [--dtype float32] [--batch 8] [--max-length N]

Each line of the samples file holds at least ``input_ids`` and ``loss_mask``, two lists of S integers. The folder gets
``<name>.ckpt`` files (format: ``streaming.record``; the name is the sample's content) and ``manifest.json``. The
manifest holds everything that the features depend on. So the same command continues where it stopped, and refuses a
folder that was written from anything else. Samples that cannot be captured are dropped, counted and named, up to
``--max-dropped``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from pydantic import model_validator
from tqdm import tqdm

from specforge_dspine.modeling.vocabulary import head_and_embedding
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.feature_folder import MANIFEST, FeatureFolder
from specforge_dspine.streaming.record import RecordError, Sample, SampleNames, TargetIdentity
from specforge_dspine.streaming.server import Devices, Dtype, ManagedServer
from specforge_dspine.utils.cli import Command, ExistingPath, IdList, Options, option, run_command
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import file_sha256, model_fingerprint
from specforge_dspine.utils.versions import VERSION

logger = logging.getLogger(__name__)

PROBE_TOKENS = 64


class CaptureError(RunError):
    """The capture cannot go on; the message says why and what to do."""


class CaptureOptions(Options):
    """What is captured, from where, into which folder."""

    target: ExistingPath = option("target model directory")
    samples: ExistingPath = option("JSON lines with input_ids and loss_mask")
    layers: IdList = option("tapped layer ids, as in 1,9,17")
    out: Path = option("feature folder (data.hidden_states_path)")
    server: str | None = option("a running server with capture enabled", default=None, metavar="URL")
    device: Devices = option("without --server, where to start one: cpu (default), or 0 or 0,1", default=())
    dtype: Dtype = option("the target's dtype and the records'", default="bfloat16")
    batch: int = option("samples per request", default=8, ge=1)
    max_length: int | None = option("cut sequences after N tokens", default=None, ge=1, metavar="N")
    max_dropped: int | None = option("stop past N dropped samples; default: 1 %, at least 8", default=None, ge=0)

    @model_validator(mode="after")
    def _one_server(self) -> CaptureOptions:
        if self.server is not None and "device" in self.model_fields_set:
            raise ValueError("give at most one of --server and --device")
        return self


def read_samples(path: Path, vocab_size: int, max_length: int | None) -> tuple[list[Sample], list[dict[str, str]]]:
    """Return the samples of a JSONL file, named by content and cut after ``max_length`` tokens, and its bad lines.

    Each bad line is a note with the keys ``sample`` (the line's number) and ``reason``.
    """
    samples: list[Sample] = []
    dropped: list[dict[str, str]] = []
    names = SampleNames()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                ids, mask = _parse_line(line, vocab_size, max_length)
                samples.append(Sample(names.next(ids, mask), ids, mask))
            except ValueError as error:
                dropped.append({"sample": f"line {number}", "reason": str(error)})
    return samples, dropped


def _parse_line(line: str, vocab_size: int, max_length: int | None) -> tuple[list[int], list[int]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    for key in ("input_ids", "loss_mask"):
        values = value.get(key) if isinstance(value, dict) else None
        if not isinstance(values, list) or any(type(k) is not int for k in values):
            raise ValueError(f"{key} must be a list of integers")
    ids, mask = value["input_ids"], value["loss_mask"]
    Sample("unnamed", ids, mask)  # raises for unequal lengths and other mask values
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"input_ids from {min(ids)} to {max(ids)}, but the target knows 0 to {vocab_size - 1}")
    ids, mask = ids[:max_length], mask[:max_length]
    if 1 not in mask:
        raise ValueError("no token to train on" + (f" within {max_length} tokens" if max_length else ""))
    return ids, mask


def capture_samples(
    folder: FeatureFolder,
    samples: Sequence[Sample],
    target: TargetIdentity,
    client: SGLangClient,
    *,
    batch: int,
    max_dropped: int,
) -> None:
    """Capture ``samples`` into ``folder``, ``batch`` at a time, from a server that is verified first.

    Raises:
        CaptureError: more than ``max_dropped`` samples were dropped (bad lines count).
        CaptureVerificationError: the server's capture cannot be trusted.
        ConnectionError: the server is gone; what was captured stays.
    """
    head, _ = head_and_embedding(target.model_path, torch.device("cpu"), getattr(torch, target.dtype))
    probe = max(samples, key=lambda sample: len(sample.input_ids)).input_ids[:PROBE_TOKENS]
    client.verify_server(target, head, probe)
    with tqdm(samples, desc="capturing", unit="sample") as bar:
        for start in range(0, len(samples), batch):
            part = samples[start : start + batch]
            for sample, result in zip(part, client.capture(part, target), strict=True):
                if isinstance(result, RecordError):
                    _drop(folder, {"sample": sample.name, "reason": result.reason}, max_dropped)
                else:
                    folder.add(sample, result)
                bar.update()


def _drop(folder: FeatureFolder, note: dict[str, str], max_dropped: int) -> None:
    folder.dropped.append(note)
    tqdm.write(f"dropped {note['sample']}: {note['reason']}", file=sys.stderr)
    if len(folder.dropped) > max_dropped:
        raise CaptureError(
            f"{len(folder.dropped)} samples were dropped, more than the {max_dropped} that --max-dropped "
            f"allows; the last: {note['sample']}: {note['reason']}"
        )


def capture(options: CaptureOptions) -> str:
    """Do what the command line says; return a sentence about the folder. Raises as ``capture_samples``."""
    target = TargetIdentity.from_config(str(options.target), options.layers, options.dtype)
    inputs = asdict(target) | {
        "model_path": str(options.target.resolve()),
        "model_fingerprint": model_fingerprint(options.target),
        "version": VERSION,
        "samples_sha256": file_sha256(options.samples),
        "max_length": options.max_length,
    }
    folder = FeatureFolder(options.out, inputs)
    folder.write_manifest(complete=False)
    samples, bad_lines = read_samples(options.samples, target.vocab_size, options.max_length)
    limit = options.max_dropped
    if limit is None:
        limit = max(8, math.ceil(0.01 * (len(samples) + len(bad_lines))))
    complete = False
    try:
        for note in bad_lines:
            _drop(folder, note, limit)
        missing = [sample for sample in samples if not folder.has(sample)]
        logger.info("%d samples, %d captured already", len(samples), len(samples) - len(missing))
        if missing:
            with contextlib.ExitStack() as stack:
                url = options.server
                if url is None:
                    server = ManagedServer(
                        target.model_path,
                        options.out / ".server",
                        target.layers,
                        dtype=target.dtype,
                        devices=options.device,
                    )
                    url = stack.enter_context(server).url
                client = stack.enter_context(SGLangClient(url))
                capture_samples(folder, missing, target, client, batch=options.batch, max_dropped=limit)
        complete = True
    finally:
        folder.write_manifest(complete=complete)
    return f"{folder.path}: complete, {len(folder.dropped)} samples dropped (see {MANIFEST})"


main = partial(run_command, Command(CaptureOptions, capture), module="specforge_dspine.capture", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
