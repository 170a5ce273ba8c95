"""Captured samples: which target they are of, their files, and the check before training.

A record is SpecForge's offline feature file: ``<name>.ckpt``, written by ``torch.save`` of

    input_ids                 int64 [S]        the ids that the target's forward really saw
    loss_mask                 int64 [S]        1 on tokens that may be trained on
    hidden_states             [1, S, T·H]      outputs of the tapped layers, in the order of their ids
    target_last_hidden_states [1, S, H]        final state after the target's last norm

in the target's own dtype. Layer id k means the output of layer k, which transformers calls ``hidden_states[k + 1]``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specforge_dspine.streaming.protocol import check_layers

PLAIN_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Config fields that change logits after the LM head (Gemma 2, Cohere, Granite), and when they do not."""


class RecordError(ValueError):
    """A record that must not be trained on: the ``name`` of its sample, and the ``reason`` in words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"sample {name!r}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """One sequence to capture: its name and two lists of S integers (loss_mask holds 0 or 1)."""

    name: str
    input_ids: list[int]
    loss_mask: list[int]

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError("input_ids is empty; a sample needs at least one token")
        if len(self.loss_mask) != len(self.input_ids):
            lengths = f"{len(self.loss_mask)} entries for {len(self.input_ids)} input_ids"
            raise ValueError(f"loss_mask has {lengths}; they must be equally long")
        if not set(self.loss_mask) <= {0, 1}:
            raise ValueError(f"loss_mask holds {sorted(set(self.loss_mask))}; only 0 and 1 are allowed")


def sample_name(input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
    """Return the name of a sample by content: 16 hex digits of SHA-256 over both lists as little-endian int64."""
    digest = hashlib.sha256()
    for values in (input_ids, loss_mask):
        for value in values:
            digest.update(int(value).to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:16]


class SampleNames:
    """Names of the samples of a file, one after the other, so that no two share one."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
        """Return ``sample_name``, with "-1", "-2", … appended for a sample that occurs again."""
        name = sample_name(input_ids, loss_mask)
        copies = self._seen[name]
        self._seen[name] += 1
        return f"{name}-{copies}" if copies else name


@dataclass(frozen=True)
class TargetIdentity:
    """The target whose states are captured; server and run must agree on every field.

    ``vocab_size`` is V, the rows of the LM head (padding included), ``hidden_size`` is H, ``layers`` the T tapped
    ids, ``dtype`` a torch dtype by name ("float32", "bfloat16", "float16").
    """

    model_path: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layers: tuple[int, ...]
    dtype: str

    @classmethod
    def from_config(cls, model_path: str, layers: Sequence[int], dtype: str) -> TargetIdentity:
        """Read the sizes from the model's Hugging Face config (its text part, if it has several).

        Raises:
            ValueError: a layer id that cannot be captured, a dtype that is not a float type, or a target whose logits
                are not LM head × final state.
        """
        from transformers import AutoConfig  # not at the top: this module imports without transformers

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


def read_record(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a record, mapped from the file (which may be deleted), or raise ``RecordError``."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds, by the way in which a file is damaged
        raise RecordError(path.stem, f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(tensors, dict):
        raise RecordError(path.stem, f"{path} holds a {type(tensors).__name__}, not a dictionary of tensors")
    return tensors


def check_record(tensors: Mapping[str, torch.Tensor], sample: Sample, target: TargetIdentity) -> None:
    """Check that a record is all of ``sample`` as seen by ``target``, in finite numbers.

    Raises:
        RecordError: a tensor is missing, of the wrong shape or dtype, or not finite (the first position is named);
            token ids or loss mask are not those sent (a shorter record says why).
    """
    sent = torch.tensor(sample.input_ids, dtype=torch.int64)
    ids = tensors.get("input_ids")
    if isinstance(ids, torch.Tensor) and ids.dim() == 1 and 0 < len(ids) < len(sent):
        raise RecordError(
            sample.name,
            f"short record: {len(ids)} of {len(sent)} tokens (the server's prefix cache or chunked prefill computed "
            "the rest elsewhere; start it with --disable-radix-cache --chunked-prefill-size -1)",
        )
    dtype, tokens = getattr(torch, target.dtype), len(sent)
    expected = {
        "input_ids": ((tokens,), torch.int64),
        "loss_mask": ((tokens,), torch.int64),
        "hidden_states": ((1, tokens, len(target.layers) * target.hidden_size), dtype),
        "target_last_hidden_states": ((1, tokens, target.hidden_size), dtype),
    }
    for key, (shape, kind) in expected.items():
        _check_tensor(tensors, key, shape, kind, sample)
    if not torch.equal(tensors["input_ids"], sent):
        at = int((tensors["input_ids"] != sent).nonzero()[0])
        value = int(tensors["input_ids"][at])
        reason = f"record of another sequence: input_ids[{at}] = {value}, but {int(sent[at])} was sent"
        raise RecordError(sample.name, reason)
    if not torch.equal(tensors["loss_mask"], torch.tensor(sample.loss_mask, dtype=torch.int64)):
        raise RecordError(sample.name, "loss_mask is not the one that was sent")


def _check_tensor(
    tensors: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...], dtype: torch.dtype, sample: Sample
) -> None:
    """Presence, shape, dtype, and finite values of one tensor."""
    if key not in tensors:
        raise RecordError(sample.name, f"{key} is missing (the record holds {sorted(tensors)})")
    value = tensors[key]
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecordError(sample.name, f"{key} has shape {found}, expected {list(shape)}")
    if value.dtype != dtype:
        raise RecordError(sample.name, f"{key} is {value.dtype}, expected {dtype}")
    finite = torch.isfinite(value)
    if not finite.all():
        _, token, channel = (~finite).nonzero()[0].tolist()
        bad = float(value[0, token, channel])
        raise RecordError(sample.name, f"{key} is {bad} at token {token}, channel {channel}")
