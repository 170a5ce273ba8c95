"""Drafts read from disk, strictly, in every known layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config

from specforge_dspine.formats.config_json import (
    BRIDGE,
    CONFIG,
    LAYOUTS,
    WEIGHTS,
    check_config,
    layout_of,
    read_config,
)
from specforge_dspine.formats.third_party import REFERENCE_TABLE, complete_config, complete_tensors, lacks_our_keys
from specforge_dspine.modeling.config import ARCHITECTURE, settings_of
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.state_dict import TABLE, check_tensors
from specforge_dspine.utils.errors import CheckpointError


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft as it was read: its layout on disk, and its tensors and configuration in our form."""

    layout: str  # "sglang", "specforge", "reference" or "dflash"
    tensors: dict[str, Tensor]
    config: Qwen3Config

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; the code table is float32."""
        return self.tensors["fc.weight"].dtype

    def to_model(self) -> DSpineDraftModel:
        """Return the draft model, in eval mode and in the dtype of its weights."""
        self.config._attn_implementation = "sdpa"
        draft = DSpineDraftModel(self.config).to(self.dtype)
        draft.load_state_dict(self.tensors, strict=True)
        return draft.eval()


def load_draft(folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> DraftCheckpoint:
    """Read and check a draft: an export of ours, SpecForge's own DSpine, the reference layout, or a plain DFlash.

    Args:
        folder: the checkpoint's folder.
        tokenizer: the target's. It tells which ids the target never emits, where config.json does not.

    Raises:
        CheckpointError: a missing, unknown or wrong-shaped tensor, a missing key, bridge or flag, by name.
    """
    folder = Path(folder)
    layout, payload = detect_layout(folder)
    is_ours = layout in LAYOUTS and not lacks_our_keys(payload)
    if not is_ours:
        payload = complete_config(payload, layout, tokenizer)
    check_config(payload)  # before transformers fills in what is missing
    config = Qwen3Config.from_dict(payload | {"architectures": [ARCHITECTURE]})
    table = LAYOUTS[layout].table if layout in LAYOUTS else REFERENCE_TABLE
    tensors = read_tensors(folder, table if settings_of(config).has_readouts else None)
    if layout == "reference" and TABLE in tensors:
        tensors = complete_tensors(tensors)
    check_tensors(tensors, config)
    if is_ours:
        check_dtypes(tensors, payload.get("dtype"))
    return DraftCheckpoint(layout, tensors, config)


def detect_layout(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the layout of a checkpoint, and its config.json.

    Raises:
        CheckpointError: config.json is missing, no draft's, or of an unknown architecture.
    """
    payload = read_config(folder)
    if isinstance(nested := payload.get("config"), dict):
        return "reference", nested
    if (folder / REFERENCE_TABLE[0]).exists():
        return "reference", payload
    dflash = payload.get("dflash_config") or {}
    if "dspine_config" in payload or BRIDGE in dflash or payload.get("architectures") == [ARCHITECTURE]:
        return layout_of(payload), payload
    if not dflash:
        raise CheckpointError(f"{folder / CONFIG} has neither dspine_config nor dflash_config: not a draft's folder")
    return "dflash", payload


def read_tensors(folder: Path, table: tuple[str, str] | None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint under our names.

    Args:
        folder: the checkpoint's folder.
        table: file and tensor name of the code table; None if the draft has none.

    Raises:
        CheckpointError: a file or the table is missing, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys((WEIGHTS, table[0] if table else WEIGHTS)):
        try:
            tensors |= load_file(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from error
    if table is not None:
        if table[1] not in tensors:
            raise CheckpointError(f"missing tensors: {table[1]} (in {table[0]})")
        tensors[TABLE] = tensors.pop(table[1])
    return tensors


def check_dtypes(tensors: Mapping[str, Tensor], dtype: str | None) -> None:
    """Check that every weight has the dtype that config.json names.

    Raises:
        CheckpointError: with the tensor's name.
    """
    for name, value in tensors.items():
        if name != TABLE and value.is_floating_point() and str(value.dtype) != f"torch.{dtype}":
            raise CheckpointError(f"{name} is {value.dtype}, config.json says dtype={dtype!r}")
