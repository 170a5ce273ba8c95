"""What one captured sample is, and how a record is checked before anyone trains on it.

A record is SpecForge's offline feature file: ``<name>.ckpt``, written by ``torch.save`` of

    input_ids                 int64 [S]        the ids that the target's forward really saw
    loss_mask                 int64 [S]        1 on tokens that may be trained on
    hidden_states             [1, S, T·H]      outputs of the tapped layers, in the order of their ids
    target_last_hidden_states [1, S, H]        final state after the target's last norm

in the target's own dtype. Layer id k means the output of layer k, which transformers calls
``hidden_states[k + 1]``. The module needs torch and the standard library alone, because the capture
plugin imports it inside SGLang's scheduler.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

PROTOCOL = 1
"""Number of the request and answer format; client and plugin refuse each other when it differs."""

CAPTURE_KEY = "specforge_dspine"
"""Our key in a request's ``sampling_params.custom_params`` and in the answer's ``meta_info``."""

CAPTURE_DIR_ENV = "SPECFORGE_DSPINE_CAPTURE_DIR"
"""Server environment: the one directory the plugin writes to; unset means no capture at all."""

CAPTURE_LAYERS_ENV = "SPECFORGE_DSPINE_CAPTURE_LAYERS"
"""Server environment: ids of the tapped layers, for example ``1,9,17``."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class RecordError(Exception):
    """A record that must not be trained on.

    Attributes:
        name: the sample it belongs to.
        reason: what is wrong with it, in words.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"sample {name!r}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """One sequence to capture: its name and two lists of S integers (loss_mask holds 0 or 1).

    Raises:
        ValueError: the lists differ in length, are empty, or the mask holds another value.
    """

    name: str
    input_ids: list[int]
    loss_mask: list[int]

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError("input_ids is empty; a sample needs at least one token")
        if len(self.loss_mask) != len(self.input_ids):
            raise ValueError(
                f"loss_mask has {len(self.loss_mask)} entries for {len(self.input_ids)} input_ids; "
                "they must be equally long"
            )
        if not set(self.loss_mask) <= {0, 1}:
            raise ValueError(f"loss_mask holds {sorted(set(self.loss_mask))}; only 0 and 1 are allowed")


PLAIN_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Config fields that change logits behind the LM head (Gemma 2, Cohere, Granite), and when they do not."""


@dataclass(frozen=True)
class TargetIdentity:
    """The target whose states are captured; server and run must agree on every field.

    ``vocab_size`` is V, the rows of the LM head (padding included), ``hidden_size`` is H,
    ``layers`` the T tapped ids, ``dtype`` a torch dtype by name ("float32", "bfloat16", "float16").
    """

    model_path: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layers: tuple[int, ...]
    dtype: str

    @classmethod
    def from_config(cls, model_path: str, layers: Sequence[int], dtype: str) -> TargetIdentity:
        """Reads the sizes from the model's Hugging Face config (its text part, if it has several).

        Raises:
            ValueError: a layer id that cannot be captured, a dtype that is not a float type, or a target whose
                logits are not LM head × final state.
        """
        from transformers import AutoConfig  # not at the top: the plugin imports this module

        if getattr(torch, dtype, None) not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype = {dtype!r}: use float32, bfloat16 or float16")
        text = AutoConfig.from_pretrained(model_path).get_text_config()
        for name, plain in PLAIN_LOGITS.items():
            if getattr(text, name, None) not in (None, plain):
                raise ValueError(
                    f"{model_path}: its config has {name} = {getattr(text, name)}, so its logits are not LM head × "
                    "final state, and a teacher made of these would be another model; such targets are not supported"
                )
        return cls(
            model_path=str(model_path),
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            layers=check_layers(layers, text.num_hidden_layers),
            dtype=dtype,
        )


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Tapped layer ids as a tuple, if SGLang can capture exactly these.

    SGLang appends states in layer order, merges duplicates, and drops the last layer silently, so the
    ids must be strictly increasing within 0 … num_layers − 2.

    Raises:
        ValueError: names the field, the value and what works.
    """
    ids = tuple(layers)
    works = f"strictly increasing ids from 0 to {num_layers - 2} (this target has {num_layers} layers)"
    if not ids:
        raise ValueError(f"layers is empty: give {works}")
    if any(isinstance(k, bool) or not isinstance(k, int) for k in ids):
        raise ValueError(f"layers = {list(ids)}: every id must be an integer; give {works}")
    if any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"layers = {list(ids)}: the ids must increase without duplicates; give {works}")
    for k in ids:
        if k == num_layers - 1:
            raise ValueError(
                f"layers = {list(ids)}: {k} is the last layer, which the server cannot tap "
                f"(its normed output is recorded anyway); give {works}"
            )
        if not 0 <= k < num_layers:
            raise ValueError(f"layers = {list(ids)}: {k} is out of range; give {works}")
    return ids


def safe_name(name: str) -> str:
    """``name`` itself, if it can be a file name inside the capture directory and nothing else.

    Raises:
        ValueError: it holds anything but letters, digits, dot, underscore and minus, starts with a dot,
            or is longer than 200 characters.
    """
    if not isinstance(name, str) or _SAFE_NAME.fullmatch(name) is None:
        raise ValueError(
            f"name = {name!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ - are allowed, "
            "and the first must not be a dot"
        )
    return name


def sample_name(input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
    """Name of a sample by content: 16 hex digits of SHA-256 over both lists as little-endian int64."""
    digest = hashlib.sha256()
    for values in (input_ids, loss_mask):
        for value in values:
            digest.update(int(value).to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:16]


class SampleNames:
    """Names the samples of a file, one after the other, so that no two share a name."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
        """``sample_name``, with "-1", "-2", … behind it for a sample that occurs again."""
        name = sample_name(input_ids, loss_mask)
        copies = self._seen[name]
        self._seen[name] += 1
        return f"{name}-{copies}" if copies else name


def mask_to_spans(loss_mask: Sequence[int]) -> list[list[int]]:
    """Runs of ones in a loss mask as ``[start, end)`` pairs, the way they travel in a request."""
    spans: list[list[int]] = []
    for position, value in enumerate(loss_mask):
        if value and spans and spans[-1][1] == position:
            spans[-1][1] = position + 1
        elif value:
            spans.append([position, position + 1])
    return spans


def spans_to_mask(spans: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """The inverse of :func:`mask_to_spans`: int64 [S] with S = ``length``.

    Raises:
        ValueError: a span is empty, out of order or reaches outside of the sequence.
    """
    mask = torch.zeros(length, dtype=torch.int64)
    end = 0
    for span in spans:
        start, stop = span
        if not end <= start < stop <= length:
            raise ValueError(f"loss_mask = {spans}: spans [start, end) must be in order and within {length} tokens")
        mask[start:stop] = 1
        end = stop
    return mask


def read_record(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a record, mapped from the file rather than read (deleting the file is safe).

    Raises:
        RecordError: the file is not a record (torn, or foreign).
    """
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds, by the way in which a file is damaged
        raise RecordError(path.stem, f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(tensors, dict):
        raise RecordError(path.stem, f"{path} holds a {type(tensors).__name__}, not a dictionary of tensors")
    return tensors


def check_record(tensors: Mapping[str, torch.Tensor], sample: Sample, target: TargetIdentity) -> None:
    """Accepts a record only if it is the whole of ``sample`` as seen by ``target``, in finite numbers.

    Raises:
        RecordError: a tensor is missing, of the wrong shape or dtype, or holds a non-finite value (the
            first position is named); the token ids are not those sent (a shorter record says why);
            the loss mask is not the one sent.
    """
    ids = _tensor(tensors, "input_ids", sample)
    sent = torch.tensor(sample.input_ids, dtype=torch.int64)
    if ids.dim() == 1 and 0 < ids.numel() < sent.numel():
        raise RecordError(
            sample.name,
            f"short record: {ids.numel()} of {sent.numel()} tokens (the server's prefix cache or chunked "
            "prefill computed the rest elsewhere; start it with --disable-radix-cache "
            "--chunked-prefill-size -1)",
        )
    _expect(ids, "input_ids", sent.shape, torch.int64, sample)
    if not torch.equal(ids, sent):
        at = int((ids != sent).nonzero()[0])
        raise RecordError(
            sample.name,
            f"foreign record: input_ids[{at}] = {int(ids[at])}, but {int(sent[at])} was sent",
        )
    mask = _tensor(tensors, "loss_mask", sample)
    _expect(mask, "loss_mask", sent.shape, torch.int64, sample)
    if not torch.equal(mask, torch.tensor(sample.loss_mask, dtype=torch.int64)):
        raise RecordError(sample.name, "loss_mask is not the one that was sent")
    dtype = getattr(torch, target.dtype)
    for key, width in (
        ("hidden_states", len(target.layers) * target.hidden_size),
        ("target_last_hidden_states", target.hidden_size),
    ):
        state = _tensor(tensors, key, sample)
        _expect(state, key, torch.Size((1, sent.numel(), width)), dtype, sample)
        finite = torch.isfinite(state)
        if not finite.all():
            _, token, channel = (~finite).nonzero()[0].tolist()
            value = float(state[0, token, channel])
            raise RecordError(sample.name, f"{key} is {value} at token {token}, channel {channel}")


def _tensor(tensors: Mapping[str, torch.Tensor], key: str, sample: Sample) -> torch.Tensor:
    if key not in tensors:
        raise RecordError(sample.name, f"{key} is missing (the record holds {sorted(tensors)})")
    return tensors[key]


def _expect(value: torch.Tensor, key: str, shape: torch.Size, dtype: torch.dtype, sample: Sample) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecordError(sample.name, f"{key} has shape {found}, expected {list(shape)}")
    if value.dtype != dtype:
        raise RecordError(sample.name, f"{key} is {value.dtype}, expected {dtype}")
