"""SGLang plugin that captures tapped layers and the final state inside an unmodified server.

SGLang loads it through the entry point ``sglang.srt.plugins`` into every process of the server. It acts only where
the environment names a capture directory and layers (see ``protocol``), and then hooks three places:

* after ``ModelRunner.load_model``: the layers to tap are set;
* after ``ForwardBatch.init_new``: requests that opt in are noted by id; the batch is copied before the model runs;
* around ``LogitsProcessor.forward``: tapped states and post-norm final state of a whole batch are at hand there. They
  are cut per request, copied to the CPU, and written in the background.

A request opts in with ``sampling_params.custom_params``::

    {"specforge_dspine": {"protocol": 1, "name": "a1b2", "tokens": S, "loss_mask": [[start, end), ...]}}

The response is in ``meta_info["specforge_dspine"]``: a list with one entry per generated token. The first is a
dictionary with the target's facts and either ``file`` (the record's name without suffix) or ``error``. A record holds
all S tokens or is not written. When a write fails after the response, ``<name>.error`` appears in place of
``<name>.ckpt``.

Not for pipeline parallelism, DP attention, speculative decoding or fused all-reduce; the plugin says so in its
responses. A prefill run inside a CUDA graph never reaches a Python hook: such a server sends no entry. Nothing here
has run on a GPU.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from specforge_dspine.streaming.protocol import (
    CAPTURE_DIR_ENV,
    CAPTURE_KEY,
    CAPTURE_LAYERS_ENV,
    PROTOCOL,
    check_layers,
    safe_name,
    spans_to_mask,
)
from specforge_dspine.utils.files import atomic_write
from specforge_dspine.utils.versions import VERSION, require

logger = logging.getLogger(__name__)

PENDING_BYTES = 1 << 30
"""Records waiting for the disk, in bytes; past it the scheduler waits (one record always passes)."""


class CaptureRefused(Exception):
    """Why a request gets no record; its text is sent back."""


def register() -> None:
    """Install the hooks if the environment asks for capture. This is the entry point.

    SGLang only logs an error and serves on without the plugin; the client then finds no entry in the response.
    """
    directory = os.environ.get(CAPTURE_DIR_ENV)
    if directory is None:
        logger.info("specforge-dspine %s: capture is off (%s is not set)", VERSION, CAPTURE_DIR_ENV)
        return
    require("sglang")
    if not os.path.isabs(directory) or not os.path.isdir(directory):
        raise ValueError(f"{CAPTURE_DIR_ENV} = {directory!r}: it must be an absolute, existing directory")
    layers = os.environ.get(CAPTURE_LAYERS_ENV, "")
    try:
        ids = tuple(int(k) for k in layers.split(","))
    except ValueError:
        raise ValueError(f"{CAPTURE_LAYERS_ENV} = {layers!r}: give layer ids as in 1,9,17") from None

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = Capture(RecordWriter(Path(directory)), ids)
    for place, hook, kind in (
        ("model_executor.model_runner.ModelRunner.load_model", capture.after_load_model, HookType.AFTER),
        ("model_executor.forward_batch_info.ForwardBatch.init_new", capture.after_init_new, HookType.AFTER),
        ("layers.logits_processor.LogitsProcessor.forward", capture.around_logits, HookType.AROUND),
    ):
        HookRegistry.register(f"sglang.srt.{place}", hook, kind)
    logger.info("specforge-dspine %s: capturing layers %s into %s", VERSION, list(ids), directory)


class RecordWriter:
    """Background threads that write records, atomically, into one directory and nowhere else.

    ``submit`` returns at once while less than ``max_bytes`` wait. Otherwise it blocks its caller, the scheduler: a
    slow disk slows the server down instead of filling its memory.
    """

    def __init__(self, directory: Path, *, threads: int = 2, max_bytes: int = PENDING_BYTES) -> None:
        self.directory = directory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dspine-writer")
        self._max_bytes = max_bytes
        self._pending = 0
        self._room = threading.Condition()

    def submit(self, name: str, record: Mapping[str, torch.Tensor]) -> int:
        """Queue one record; return its size in bytes (of the tensors)."""
        size = sum(tensor.nbytes for tensor in record.values())
        with self._room:
            self._room.wait_for(lambda: self._pending == 0 or self._pending + size <= self._max_bytes)
            self._pending += size
        self._pool.submit(self._write, name, record, size)
        return size

    def _write(self, name: str, record: Mapping[str, torch.Tensor], size: int) -> None:
        try:
            with atomic_write(self.directory / f"{name}.ckpt", sync=False) as file:
                torch.save(dict(record), file.name)  # by name: torch then writes without copies in Python
        except Exception as error:
            logger.exception("specforge-dspine: the record %s could not be written", name)
            with atomic_write(self.directory / f"{name}.error", sync=False) as file:
                file.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        finally:
            with self._room:
                self._pending -= size
                self._room.notify_all()


class Capture:
    """The three hooks and what they share: the target's facts and the requests of the next forward.

    An exception in a hook would end the server, so each hook turns its own into responses or log lines.
    """

    def __init__(self, writer: RecordWriter, layers: tuple[int, ...]) -> None:
        self._writer = writer
        self._layers = layers
        self._facts: dict[str, Any] = {}
        self._refusal: str | None = "the model is not loaded yet"
        self._rank = 0
        self._requested: dict[str, Any] = {}

    def after_load_model(self, result: None, runner: Any) -> None:
        """Set the tapped layers, or note why this server cannot capture."""
        from sglang.srt.runtime_context import get_parallel

        if runner.is_draft_worker:
            return
        config = runner.model_config
        self._rank = get_parallel().tp_rank
        self._facts = {
            "protocol": PROTOCOL,
            "version": VERSION,
            "model_path": runner.server_args.model_path,
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": list(self._layers),
            "dtype": str(config.dtype).removeprefix("torch."),
            "capture_dir": str(self._writer.directory),
        }
        try:
            check_layers(self._layers, config.num_hidden_layers)
            _check_server(runner, get_parallel())
            runner.model.set_dflash_layers_to_capture(list(self._layers))
            self._refusal = None
        except Exception as error:
            self._refusal = str(error) or type(error).__name__
            logger.exception("specforge-dspine: this server cannot capture")

    def after_init_new(self, result: Any, cls: type, batch: Any, runner: Any, **unused: Any) -> None:
        """Note the requests of the coming forward that opt in and have no output yet."""
        if runner.is_draft_worker:
            return
        self._requested = {
            request.rid: request.sampling_params.custom_params[CAPTURE_KEY]
            for request in batch.reqs
            if not request.output_ids
            and isinstance(request.sampling_params.custom_params, dict)
            and CAPTURE_KEY in request.sampling_params.custom_params
        }

    def around_logits(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Sequence[torch.Tensor] | torch.Tensor | None = None,
        hidden_states_before_norm: torch.Tensor | None = None,
    ) -> Any:
        """Run the logits as they would run without the plugin, then cut out the records.

        ``input_ids`` is [tokens], ``hidden_states`` [tokens, H] after the final norm, ``aux_hidden_states`` T tensors
        [tokens, H]; tokens is the sum over the batch's requests.
        """
        # Taps are hidden from the server: it would return them instead of its own hidden states.
        passed_on = aux_hidden_states if self._refusal else None
        output = original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, passed_on, hidden_states_before_norm
        )
        requested, self._requested = self._requested, {}
        # SGLang 0.5.14 matches these lists to requests by position among those that have one, so every
        # request of every forward gets an entry, whether it opted in or not.
        entries: list[dict[str, Any] | None] = [None] * logits_metadata.batch_size
        if requested and logits_metadata.forward_mode.is_extend():
            start = 0
            lengths = logits_metadata.extend_seq_lens_cpu
            for index, (rid, length) in enumerate(zip(logits_metadata.rids, lengths, strict=True)):
                if rid in requested:
                    cut = slice(start, start + length)
                    cached = logits_metadata.extend_prefix_lens_cpu[index]
                    states = (input_ids, aux_hidden_states, hidden_states)
                    entries[index] = self._capture(requested[rid], cut, cached, sum(lengths), states)
                start += length
        output.customized_info = {**(output.customized_info or {}), CAPTURE_KEY: entries}
        return output

    def _capture(self, request: Any, cut: slice, cached: int, tokens: int, states: tuple) -> dict[str, Any]:
        """The entry of one request, whose record is cut out and queued."""
        try:
            if self._refusal:
                raise CaptureRefused(self._refusal)
            name, mask = _parse(request, cut, cached)
            record = self._record(cut, tokens, mask, *states)
            size = self._writer.submit(name, record) if self._rank == 0 else 0
            return self._facts | {"file": name, "tokens": cut.stop - cut.start, "bytes": size}
        except CaptureRefused as refused:
            return self._facts | {"error": str(refused)}
        except Exception as error:
            logger.exception("specforge-dspine: capture of a request failed")
            return self._facts | {"error": f"{type(error).__name__}: {error}"}

    def _record(
        self,
        cut: slice,
        tokens: int,
        loss_mask: torch.Tensor,
        input_ids: torch.Tensor,
        taps: Sequence[torch.Tensor] | torch.Tensor | None,
        final: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        # T tensors [tokens, H], or (some models of later releases) one of [tokens, T·H].
        parts = [taps] if isinstance(taps, torch.Tensor) else list(taps or [])
        width, expected = sum(part.shape[-1] for part in parts), len(self._layers) * final.shape[-1]
        if width != expected:
            raise CaptureRefused(f"the taps are {width} wide, not {expected} = layers × hidden size")
        if any(len(tensor) != tokens for tensor in (input_ids, final, *parts)):
            raise CaptureRefused("the batch is padded (DP attention, or a prefill CUDA graph): unsupported")
        # Copies, not views: the server reuses its buffers, and saving a view would save all of its storage.
        return {
            "input_ids": input_ids[cut].to("cpu", torch.int64, copy=True),
            "loss_mask": loss_mask,
            "hidden_states": torch.cat([part[cut] for part in parts], dim=-1).to("cpu").unsqueeze(0),
            "target_last_hidden_states": final[cut].to("cpu", copy=True).unsqueeze(0),
        }


def _parse(request: Any, cut: slice, cached: int) -> tuple[str, torch.Tensor]:
    """Return name and loss mask of a request that opted in, if its forward covers exactly its S tokens."""
    if not isinstance(request, dict) or request.get("protocol") != PROTOCOL:
        found = request.get("protocol") if isinstance(request, dict) else request
        raise CaptureRefused(
            f"protocol {found!r} is not understood: specforge-dspine {VERSION} in this server speaks "
            f"{PROTOCOL}; install the same version on both sides"
        )
    missing = {"name", "tokens", "loss_mask"} - request.keys()
    if missing:
        raise CaptureRefused(f"the request lacks {sorted(missing)}")
    length = cut.stop - cut.start
    if cached or length != request["tokens"]:
        raise CaptureRefused(
            f"this forward computes {length} of {request['tokens']} tokens ({cached} came from the prefix "
            "cache or an earlier chunk); start the server with --disable-radix-cache "
            "--chunked-prefill-size -1, or send a fresh extra_key with every request"
        )
    try:
        return safe_name(request["name"]), spans_to_mask(request["loss_mask"], length)
    except (TypeError, ValueError) as error:
        raise CaptureRefused(str(error)) from None


def _check_server(runner: Any, parallel: Any) -> None:
    """Refuse the ways of serving under which tapped states would be missing or partial sums."""
    args = runner.server_args
    if parallel.pp_size > 1:
        raise CaptureRefused("pipeline parallelism splits the layers: serve with --pp-size 1")
    if args.enable_dp_attention:
        raise CaptureRefused("DP attention scatters the batch: serve without --enable-dp-attention")
    if args.speculative_algorithm is not None:
        raise CaptureRefused("speculative decoding uses the same taps: serve without --speculative-algorithm")
    fused = args.flashinfer_allreduce_fusion_backend is not None or args.enable_aiter_allreduce_fusion
    if parallel.tp_size > 1 and fused:
        raise CaptureRefused(
            "fused all-reduce leaves partial sums in the taps: serve with "
            "--enforce-disable-flashinfer-allreduce-fusion and without --enable-aiter-allreduce-fusion"
        )
    if not hasattr(runner.model, "set_dflash_layers_to_capture"):
        raise CaptureRefused(f"{type(runner.model).__name__} offers no taps in this SGLang version")
