"""Drafts read from disk, strictly, in every known layout.

    sglang, specforge   as this package writes them; SpecForge's own DSpine is "specforge" with fewer keys
    reference           ``codes`` C [V, r] in transfer.safetensors, no buffers; config.json perhaps under ``config``
    dflash              a plain DFlash: no injection, no table, no ``dspine_config``

What others leave to a reader's defaults is completed. A draft of this package has to be complete.
"""

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

from specforge_dspine.formats import config_json
from specforge_dspine.formats.config_json import BRIDGE, CONFIG, LAYOUTS, WEIGHTS, integer, section
from specforge_dspine.modeling.draft_config import ARCHITECTURE
from specforge_dspine.modeling.draft_model import DSpineDraftModel, meta_draft
from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.modeling.state_dict import READY, TABLE, check_tensors
from specforge_dspine.modeling.vocabulary import output_vocabulary
from specforge_dspine.utils.errors import CheckpointError
from specforge_dspine.utils.files import read_json

REFERENCE_TABLE = ("transfer.safetensors", "codes")
OWN_KEYS = {"excluded_ids", "valid_vocab_size", "causal", "injection", "refinement", "alignment", "curriculum"}
"""Keys of ``dspine_config`` that only this package writes. A draft of ours that lost one has others left."""

PLAIN_DFLASH = {
    **{"injection": False, "alignment": "off", "replacement_layers": 0},
    **{"transfer_rank": 1, "message_size": 1},  # of a space that it does not have
}


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
    """Read and check a draft. A target's ``tokenizer`` tells which ids it never emits, where config.json does not.

    Raises:
        CheckpointError: a missing, unknown or wrong-shaped tensor, a missing key, bridge or flag, by name.
        InvalidFileError: config.json is missing, or no JSON object.
    """
    folder = Path(folder)
    layout, payload = detect_layout(folder)
    settings = payload.get("dspine_config")
    is_ours = layout in LAYOUTS and isinstance(settings, dict) and not OWN_KEYS.isdisjoint(settings)
    if not is_ours:
        payload = complete_config(payload, layout, tokenizer)
    config_json.check_config(payload)  # before transformers fills in what is missing
    config = Qwen3Config.from_dict(payload | {"architectures": [ARCHITECTURE]})
    table = LAYOUTS[layout].table if layout in LAYOUTS else REFERENCE_TABLE
    tensors = read_tensors(folder, table if settings_of(config).has_readouts else None)
    if layout == "reference" and TABLE in tensors:
        if tensors[TABLE].dtype not in (torch.float32, torch.float64):
            raise CheckpointError(f"{'/'.join(table)} is {tensors[TABLE].dtype}, and must be float32")
        tensors |= {TABLE: tensors[TABLE].float(), READY: torch.tensor(True)}
    check_tensors(tensors, meta_draft(config))
    for name, value in tensors.items() if is_ours else ():
        if name not in (TABLE, READY) and str(value.dtype) != f"torch.{payload.get('dtype')}":
            raise CheckpointError(f"{name} is {value.dtype}, config.json says dtype={payload.get('dtype')!r}")
    return DraftCheckpoint(layout, tensors, config)


def detect_layout(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the layout of a checkpoint, and its config.json; raises as ``load_draft``."""
    payload = read_json(folder / CONFIG)
    if isinstance(nested := payload.get("config"), dict):
        return "reference", nested
    if (folder / REFERENCE_TABLE[0]).exists():
        return "reference", payload
    dflash = payload.get("dflash_config")
    has_bridge = isinstance(dflash, dict) and BRIDGE in dflash
    if "dspine_config" in payload or has_bridge or payload.get("architectures") == [ARCHITECTURE]:
        return config_json.layout_of(payload), payload
    if not isinstance(dflash, dict):
        raise CheckpointError(f"{folder / CONFIG} has neither dspine_config nor dflash_config: not a draft's folder")
    return "dflash", payload


def complete_config(
    payload: Mapping[str, Any], layout: str, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Return a config.json of others with what its writer left to a reader's defaults, still to be checked.

    The blocks of a plain DFlash are bidirectional unless its config says otherwise. Without a tokenizer, decoding
    excludes the mask alone, unless the config names more.
    """
    dflash, vocab = section(payload, "dflash_config"), integer(payload, "vocab_size")
    mask_id = integer(dflash, "mask_token_id", "dflash_config.")
    excluded, valid = ([mask_id], vocab) if tokenizer is None else output_vocabulary(tokenizer, vocab, mask_id)
    settings: dict[str, Any] = {"excluded_ids": excluded, "valid_vocab_size": valid}
    if layout == "dflash":
        settings |= PLAIN_DFLASH | {"causal": payload.get("is_causal", dflash.get("causal", False))}
    elif payload.get("is_causal") is False:
        raise CheckpointError("is_causal is false: not a DSpine draft, whose blocks are causal")
    else:
        settings |= section(payload, "dspine_config")
    settings = config_json.parse_settings(settings).model_dump(mode="json")
    block_size = payload.get("block_size", dflash.get("block_size"))
    rope: dict[str, Any] = payload.get("rope_parameters") or {"rope_type": "default"}
    theta = rope.get("rope_theta", payload.get("rope_theta"))
    layers = ["full_attention"] * integer(payload, "num_hidden_layers")
    return dict(payload) | {
        "architectures": payload.get("architectures") if layout in LAYOUTS else [ARCHITECTURE],
        "block_size": block_size,
        "is_causal": settings["causal"],
        "layer_types": payload.get("layer_types", layers),
        "rope_theta": theta,
        "rope_parameters": rope | {"rope_theta": theta},
        "dflash_config": dict(dflash) | {"block_size": block_size, "causal": settings["causal"]},
        "dspine_config": settings,
    }


def read_tensors(folder: Path, table: tuple[str, str] | None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint under our names; ``table`` is file and name of its code table, if any."""
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys((WEIGHTS, table[0] if table else WEIGHTS)):
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    if table is not None:
        if table[1] not in tensors:
            raise CheckpointError(f"missing tensors: {table[1]} (in {table[0]})")
        tensors[TABLE] = tensors.pop(table[1])
    return tensors
