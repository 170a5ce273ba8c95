"""Files of a checkpoint, and two layouts beside the flavors that we write: "reference", and DFlash of others.

    model.safetensors      the draft's tensors, named as ours, without the two buffers
    transfer.safetensors   ``codes`` C [V, r]
    config.json            as in formats.py, perhaps under a ``config`` key, without all of its flags

``read_reference`` brings such a folder into our form: ``export`` then verifies and writes it like any other draft.
A DFlash draft that somebody else trained has the same names without injection and table, and a config.json without
``dspine_config``; ``read_dflash`` completes it for comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.formats.config_json import (
    WEIGHTS,
    check_config,
    integer,
    parse_settings,
    read_config,
    section,
)
from specforge_dspine.modeling.draft_config import ARCHITECTURE
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.modeling.state_dict import READY, TABLE, check_tensors
from specforge_dspine.utils.errors import CheckpointError

REFERENCE_TABLE = ("transfer.safetensors", "codes")


def read_tensors(folder: Path, table: tuple[str, str] | None) -> dict[str, Tensor]:
    """The tensors of a checkpoint under our names; ``table`` is the file and name of the code table, if it has one.

    Raises:
        CheckpointError: a file or the table is missing, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for each in dict.fromkeys((WEIGHTS, table[0] if table else WEIGHTS)):
        try:
            tensors |= load_file(folder / each)
        except OSError as error:
            raise CheckpointError(f"{folder / each} cannot be read: {error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{folder / each} is damaged: {error}") from error
    if table is None:
        return tensors
    if table[1] not in tensors:
        raise CheckpointError(f"missing tensors: {table[1]} (in {table[0]})")
    tensors[TABLE] = tensors.pop(table[1])
    return tensors


def read_reference(folder: Path) -> tuple[dict[str, Tensor], Qwen3Config]:
    """Tensors and config of a draft in the reference layout, in our form.

    Ids that the target never emits are not part of that layout: unless its config names them, only the mask is
    excluded in decoding.

    Raises:
        CheckpointError: a file, tensor or key is missing or wrong, by name.
    """
    payload = read_config(folder)
    payload = dict(payload.get("config", payload))
    tensors = read_tensors(folder, REFERENCE_TABLE)
    codes = tensors[TABLE]
    if codes.dtype not in (torch.float32, torch.float64):
        raise CheckpointError(f"{'/'.join(REFERENCE_TABLE)} is {codes.dtype}, and must be float32")
    tensors |= {TABLE: codes.float(), READY: torch.tensor(True)}
    if payload.get("is_causal") is False:
        raise CheckpointError("is_causal is false: not a DSpine draft, whose blocks are causal")

    dflash = dict(section(payload, "dflash_config"))
    mask_id = integer(dflash, "mask_token_id", "dflash_config.")
    given = {"excluded_ids": [mask_id], "valid_vocab_size": integer(payload, "vocab_size")}
    settings = parse_settings(given | dict(section(payload, "dspine_config")))
    return tensors, completed(payload, dflash, settings.model_dump(mode="json"))


def read_dflash(folder: Path, emittable: tuple[list[int], int]) -> tuple[dict[str, Tensor], Qwen3Config]:
    """Tensors and config of a plain DFlash draft in our form.

    Blocks are bidirectional unless its config says otherwise. ``emittable``: the ids below the second number that the
    target never generates, and the rows that its tokenizer reaches.

    Raises:
        CheckpointError: a file, tensor or key is missing or wrong, by name.
    """
    payload = read_config(folder)
    dflash = dict(section(payload, "dflash_config"))
    settings = DSpineSettings(
        transfer_rank=1,  # of a space that it has not got
        message_size=1,
        replacement_layers=0,
        causal=payload.get("is_causal", dflash.get("causal", False)),
        injection=False,
        refinement=False,
        curriculum=False,
        alignment="off",
        excluded_ids=tuple(sorted({integer(dflash, "mask_token_id", "dflash_config."), *emittable[0]})),
        valid_vocab_size=emittable[1],
    )
    config = completed(payload, dflash, settings.model_dump(mode="json"))
    tensors = read_tensors(folder, None)
    check_tensors(tensors, config)
    return tensors, config


def completed(payload: Mapping[str, Any], dflash: Mapping[str, Any], settings: dict[str, Any]) -> Qwen3Config:
    """The config with what its writer left to a reader's defaults, checked.

    Raises:
        CheckpointError: a key is missing or wrong, by name.
    """
    block_size = payload.get("block_size", dflash.get("block_size"))
    theta = (payload.get("rope_parameters") or {}).get("rope_theta", payload.get("rope_theta"))
    rope: dict[str, Any] = payload.get("rope_parameters") or {"rope_type": "default"}
    layers = ["full_attention"] * integer(payload, "num_hidden_layers")
    whole = dict(payload) | {
        "architectures": [ARCHITECTURE],
        "block_size": block_size,
        "is_causal": settings["causal"],
        "layer_types": payload.get("layer_types", layers),
        "rope_theta": theta,
        "rope_parameters": rope | {"rope_theta": theta},
        "dflash_config": dict(dflash) | {"block_size": block_size, "causal": settings["causal"]},
        "dspine_config": settings,
    }
    check_config(whole)  # before transformers fills in what is missing
    return Qwen3Config.from_dict(whole)
