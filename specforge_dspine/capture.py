"""Writes SpecForge's offline features: one record per training sample, captured by the streaming plugin.

    python -m specforge_dspine.capture --target DIR --samples FILE.jsonl --layers 1,9,17 --out DIR \\
        [--server URL | --device cpu|0|0,1] [--dtype float32] [--batch 8] [--max-length N]

Each line of the samples file holds at least ``input_ids`` and ``loss_mask``, two lists of S integers. The
folder gets ``<name>.ckpt`` files (format: ``stream.record``; the name is the sample's content) and
``manifest.json``. Everything the features depend on is in the manifest, so the command run again continues
where it stopped, and refuses a folder that was written from anything else. Samples that cannot be captured
are dropped, counted and named, up to ``--max-dropped``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead
from tqdm import tqdm

from specforge_dspine.streaming.client import CaptureVerificationError, SGLangClient
from specforge_dspine.streaming.feature_folder import MANIFEST, CaptureError, FeatureFolder, read_samples
from specforge_dspine.streaming.record import RecordError, Sample, TargetIdentity
from specforge_dspine.streaming.server import ManagedServer, ManagedServerError, parse_ids
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.versions import VERSION

PROBE_TOKENS = 64


def capture(
    folder: FeatureFolder,
    samples: Sequence[Sample],
    target: TargetIdentity,
    client: SGLangClient,
    *,
    batch: int,
    max_dropped: int,
) -> None:
    """Captures the samples that ``folder`` lacks, ``batch`` at a time, from a server that is proven first.

    Raises:
        CaptureError: more than ``max_dropped`` samples were dropped (bad lines count).
        CaptureVerificationError: the server's capture cannot be trusted.
        ConnectionError: the server is gone; what was captured stays.
    """
    head = TargetEmbeddingsAndHead.from_pretrained(
        target.model_path, device="cpu", dtype=getattr(torch, target.dtype)
    )
    probe = max(samples, key=lambda sample: len(sample.input_ids)).input_ids[:PROBE_TOKENS]
    client.verify_server(target, head.lm_head.weight, probe)
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


@contextlib.contextmanager
def _client(options: argparse.Namespace, target: TargetIdentity) -> Iterator[SGLangClient]:
    """A client of ``--server``, or of a server that lives as long as the context."""
    with contextlib.ExitStack() as stack:
        url = options.server
        if url is None:
            server = ManagedServer(
                target.model_path,
                options.out / ".server",
                target.layers,
                dtype=target.dtype,
                devices=[] if options.device == "cpu" else parse_ids(options.device),
            )
            url = stack.enter_context(server).url
        yield stack.enter_context(SGLangClient(url))


def run(options: argparse.Namespace) -> FeatureFolder:
    """The whole command; see the module's text. Returns the folder it filled."""
    target = TargetIdentity.from_config(options.target, options.layers, options.dtype)
    inputs = asdict(target) | {
        "model_path": str(Path(options.target).resolve()),
        "model_fingerprint": model_fingerprint(Path(options.target)),
        "version": VERSION,
        "samples_sha256": hashlib.sha256(options.samples.read_bytes()).hexdigest(),
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
        print(f"{len(samples)} samples, {len(samples) - len(missing)} captured already", file=sys.stderr)
        if missing:
            with _client(options, target) as client:
                capture(folder, missing, target, client, batch=options.batch, max_dropped=limit)
        complete = True
    finally:
        folder.write_manifest(complete=complete)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.capture",
        description="Write SpecForge offline features through an SGLang server with our capture plugin.",
    )
    parser.add_argument("--target", required=True, help="target model directory")
    parser.add_argument("--samples", required=True, type=Path, help="JSONL with input_ids and loss_mask")
    parser.add_argument("--layers", required=True, type=parse_ids, help="tapped layer ids, as in 1,9,17")
    parser.add_argument("--out", required=True, type=Path, help="feature folder (data.hidden_states_path)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--server", metavar="URL", help="a running server with capture enabled")
    place.add_argument("--device", default="cpu", help="where to start one: cpu (default), or 0 or 0,1")
    parser.add_argument("--dtype", default="bfloat16", help="the target's dtype and the records' (bfloat16)")
    parser.add_argument("--batch", type=int, default=8, help="samples per request (8)")
    parser.add_argument("--max-length", type=int, metavar="N", help="cut sequences after N tokens")
    parser.add_argument("--max-dropped", type=int, metavar="N", help="stop past N dropped samples (1 %%, at least 8)")
    options = parser.parse_args(arguments)
    for name in ("batch", "max_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the server is ended
    try:
        folder = run(options)
    except (CaptureError, CaptureVerificationError, ManagedServerError, ConnectionError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command continues from here") from None
    print(f"{folder.path}: complete, {len(folder.dropped)} samples dropped (see {MANIFEST})", file=sys.stderr)


if __name__ == "__main__":
    main()
