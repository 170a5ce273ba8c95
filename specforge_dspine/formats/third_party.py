"""Configurations of drafts that this package did not write, completed to our form.

reference   ``codes`` C [V, r] in transfer.safetensors, no buffers in model.safetensors; config.json perhaps under
            a ``config`` key, without all flags
dflash      a plain DFlash: no injection, no table, no ``dspine_config``
specforge   SpecForge's own DSpine: our tensors, and a ``dspine_config`` of its own eleven keys only
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specforge_dspine.formats.config_json import LAYOUTS, integer, mask_token, parse_settings, section
from specforge_dspine.modeling.config import ARCHITECTURE, DSpineSettings
from specforge_dspine.modeling.state_dict import READY, TABLE
from specforge_dspine.modeling.vocabulary import emittable
from specforge_dspine.utils.errors import CheckpointError

REFERENCE_TABLE = ("transfer.safetensors", "codes")
SPECFORGE_KEYS = {
    "transfer_rank",
    "message_size",
    "top_k",
    "ce_weight",
    "alignment_weight",
    "alignment_warmup_steps",
    "replacement_layers",
    "replacement_probability",
    "replacement_hold_ratio",
    "replacement_end_ratio",
    "candidate_mass_threshold",
}
"""``dspine_config`` as SpecForge writes it; the other fields of ``DSpineSettings`` are this package's own."""

PLAIN_DFLASH = {
    "transfer_rank": 1,  # of a space that it does not have
    "message_size": 1,
    "replacement_layers": 0,
    "injection": False,
    "refinement": False,
    "curriculum": False,
    "alignment": "off",
}


def lacks_our_keys(payload: Mapping[str, Any]) -> bool:
    """Does ``dspine_config`` hold SpecForge's keys alone? A draft of ours that lost a key has others left."""
    ours = DSpineSettings.model_fields.keys() - SPECFORGE_KEYS
    settings = payload.get("dspine_config")
    return isinstance(settings, Mapping) and not ours & settings.keys()


def complete_config(
    payload: Mapping[str, Any], layout: str, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Return config.json with everything that its writer left to a reader's defaults, still to be checked.

    Args:
        payload: the config.json.
        layout: of the checkpoint. The blocks of "dflash" are bidirectional unless the config says otherwise.
        tokenizer: the target's. Without it the mask is the only id that decoding excludes, unless the config names
            others.

    Raises:
        CheckpointError: a key that cannot be completed is missing or wrong, by name.
    """
    dflash, mask_id, vocab = section(payload, "dflash_config"), mask_token(payload), integer(payload, "vocab_size")
    excluded, valid = ([mask_id], vocab) if tokenizer is None else emittable(tokenizer, vocab, mask_id)
    settings: dict[str, Any] = {"excluded_ids": excluded, "valid_vocab_size": valid}
    if layout == "dflash":
        settings |= PLAIN_DFLASH | {"causal": payload.get("is_causal", dflash.get("causal", False))}
    elif payload.get("is_causal") is False:
        raise CheckpointError("is_causal is false: not a DSpine draft, whose blocks are causal")
    else:
        settings |= section(payload, "dspine_config")
    settings = parse_settings(settings).model_dump(mode="json")
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


def complete_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a reference checkpoint with the two buffers, the table C [V, r] in float32.

    Raises:
        CheckpointError: the table was stored in fewer bits.
    """
    codes = tensors[TABLE]
    if codes.dtype not in (torch.float32, torch.float64):
        raise CheckpointError(f"{'/'.join(REFERENCE_TABLE)} is {codes.dtype}, and must be float32")
    return tensors | {TABLE: codes.float(), READY: torch.tensor(True)}
