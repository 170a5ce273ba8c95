"""config.json of the two layouts that are written.

    specforge   architectures ["DSpineDraftModel"]; loads with DSpineDraftModel.from_pretrained
    sglang      architectures ["DFlashDraftModel"] and dflash_config.selected_prefix_code_bridge, which makes the
                serving plugin load it as DSpine; a variant without injection has no bridge and is a plain DFlash

``SGLANG_LAYOUT`` is the one table to correct when a released checkpoint can be read: neither the bridge's own keys
nor the files of that layout are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from specforge_dspine.modeling.draft_config import ARCHITECTURE, check_vocabulary, rope_theta
from specforge_dspine.modeling.draft_model import meta_draft
from specforge_dspine.modeling.settings import DSpineSettings, settings_of
from specforge_dspine.modeling.state_dict import TABLE
from specforge_dspine.utils.errors import CheckpointError

BRIDGE = "selected_prefix_code_bridge"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "block_size",
    "num_target_layers",
)
"""Keys that a reader would otherwise fill in from its own defaults, silently."""

DROPPED = (
    "auto_map",
    "_name_or_path",
    "transformers_version",
    "chunk_size_feed_forward",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
)
"""Keys of transformers' base class that say nothing about a draft, and code that is not shipped."""


class Layout(NamedTuple):
    """What distinguishes a layout on disk. All tensors but the code table are in ``WEIGHTS`` under our names."""

    architecture: str
    bridge: dict[str, str] | None  # keys of the bridge -> the fields of DSpineSettings that they hold
    table: tuple[str, str] = (WEIGHTS, TABLE)  # file and tensor name of the code table


# vLLM names the sizes transfer_dim and message_dim; the rest is our reading. UNVERIFIED against the released plugin.
SGLANG_LAYOUT = Layout(
    "DFlashDraftModel",
    {"transfer_dim": "transfer_rank", "message_dim": "message_size", "top_k": "top_k"},
)
LAYOUTS = {"sglang": SGLANG_LAYOUT, "specforge": Layout(ARCHITECTURE, None)}


def layout_config(payload: dict[str, Any], config: Any, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of ``layout`` for the draft's own ``config``; ``payload`` is its dictionary."""
    settings = settings_of(config)
    refuse_unservable(layout, settings)
    architecture, bridge, _ = LAYOUTS[layout]
    theta = rope_theta(config)
    out = {key: value for key, value in payload.items() if key not in DROPPED}
    out |= {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "is_causal": settings.causal,
        "rope_theta": theta,
        "rope_parameters": dict(payload.get("rope_parameters") or {"rope_type": "default"}) | {"rope_theta": theta},
        "tie_word_embeddings": False,
        "dflash_config": dict(payload["dflash_config"])
        | {"block_size": config.block_size, "causal": settings.causal},
    }
    out["dflash_config"].pop(BRIDGE, None)
    if bridge is not None and settings.injection:
        out["dflash_config"][BRIDGE] = {key: getattr(settings, field) for key, field in bridge.items()}
    return out


def refuse_unservable(layout: str, settings: DSpineSettings) -> None:
    """Raise ``CheckpointError`` for a variant that ``layout`` cannot express: with a bridge, an engine refines."""
    if LAYOUTS[layout].bridge is not None and settings.injection and not settings.refinement:
        raise CheckpointError(
            f"refinement is off in this draft, and an engine that serves the {layout} layout with injection always "
            "refines; export it as specforge"
        )


def without_readouts(tensors: Mapping[str, Tensor], config: Any) -> tuple[dict[str, Tensor], Any]:
    """Return a draft without injection as the plain DFlash that it decodes as; the readouts served its training."""
    plain = type(config).from_dict(config.to_dict())
    plain.dspine_config = dict(plain.dspine_config) | {"alignment": "off"}
    return {name: tensors[name] for name in meta_draft(plain).state_dict()}, plain


def layout_of(payload: Mapping[str, Any]) -> str:
    """Return the layout that ``architectures`` names, or raise ``CheckpointError``."""
    architectures = payload.get("architectures")
    for name, layout in LAYOUTS.items():
        if architectures == [layout.architecture]:
            return name
    known = [layout.architecture for layout in LAYOUTS.values()]
    raise CheckpointError(f"architectures={architectures}: expected one of {known}")


def check_config(payload: Mapping[str, Any]) -> None:
    """Check that a config.json holds everything that an engine would otherwise guess.

    Raises:
        CheckpointError: a missing or contradictory key, bridge or flag, or an id out of range, by name.
    """
    layout = layout_of(payload)
    dflash, ours = section(payload, "dflash_config"), section(payload, "dspine_config")
    _check_sizes(payload)
    _check_ids(payload, dflash, ours)
    for name, value, engine in (
        ("is_causal", payload.get("is_causal"), "SGLang"),
        ("dflash_config.causal", dflash.get("causal"), "vLLM"),
    ):
        if value is not ours["causal"]:
            wrong = "bidirectional" if ours["causal"] else "causal"
            raise CheckpointError(
                f"{name} is {json.dumps(value)} and dspine_config.causal {json.dumps(ours['causal'])}: {engine} "
                f"would serve the draft with {wrong} blocks"
            )
    if dflash.get("block_size") != payload["block_size"]:
        raise CheckpointError(
            f"dflash_config.block_size={dflash.get('block_size')} differs from block_size={payload['block_size']}"
        )
    _check_bridge(layout, dflash, ours)


def section(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a nested section of a config.json, or raise ``CheckpointError``."""
    value = payload.get(name)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is missing from config.json")
    return value


def integer(payload: Mapping[str, Any], name: str, path: str = "") -> int:
    """Return a whole number of a config.json, or raise ``CheckpointError``."""
    value = payload.get(name)
    if value is None:
        raise CheckpointError(f"{path}{name} is missing from config.json")
    if type(value) is not int:
        raise CheckpointError(f"{path}{name}={value!r} is not a whole number")
    return value


def parse_settings(values: Mapping[str, Any]) -> DSpineSettings:
    """Return ``dspine_config`` of a config.json, or raise ``CheckpointError`` with the wrong key's name."""
    try:
        return DSpineSettings.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"dspine_config.{name}={problem['input']!r}: {problem['msg']}") from error


def _check_sizes(payload: Mapping[str, Any]) -> None:
    """Sizes, layer types, norms and RoPE."""
    for name in SIZES:
        integer(payload, name)
    for name in ("rms_norm_eps", "rope_theta"):
        if not isinstance(payload.get(name), float | int):
            raise CheckpointError(f"{name}={payload.get(name)!r} in config.json; a number is needed")
    if section(payload, "rope_parameters").get("rope_theta") != payload["rope_theta"]:
        raise CheckpointError(f"rope_parameters.rope_theta differs from rope_theta={payload['rope_theta']}")
    if payload.get("layer_types") != ["full_attention"] * payload["num_hidden_layers"]:
        raise CheckpointError(
            f"layer_types={payload.get('layer_types')}: full_attention for each of the "
            f"{payload['num_hidden_layers']} layers is needed"
        )


def _check_ids(payload: Mapping[str, Any], dflash: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """The mask, the tapped layers, and the ids that decoding excludes."""
    vocab, layers = payload["vocab_size"], payload["num_target_layers"]
    mask_id = integer(dflash, "mask_token_id", "dflash_config.")
    if not 0 <= mask_id < vocab:
        raise CheckpointError(f"dflash_config.mask_token_id={mask_id} is outside the vocabulary of {vocab} rows")
    ids: Any = dflash.get("target_layer_ids")
    is_list = isinstance(ids, list) and bool(ids) and all(type(k) is int for k in ids)
    if not is_list or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= layers - 2:
        raise CheckpointError(f"dflash_config.target_layer_ids={ids}: increasing ids in 0..{layers - 2} are needed")
    if missing := [name for name in DSpineSettings.model_fields if name not in ours]:
        raise CheckpointError(f"dspine_config lacks {', '.join(missing)}")
    integer(ours, "valid_vocab_size", "dspine_config.")
    settings = parse_settings(ours)
    try:
        check_vocabulary(settings, vocab)
    except ValueError as error:
        raise CheckpointError(f"dspine_config: {error}") from error


def _check_bridge(layout: str, dflash: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The bridge agrees with ``dspine_config``, or the layout has none."""
    expected, bridge = LAYOUTS[layout].bridge, dflash.get(BRIDGE)
    if expected is None or not settings["injection"]:
        if bridge is not None:
            raise CheckpointError(
                f"dflash_config.{BRIDGE} belongs to the sglang layout of drafts with injection, not to this one"
            )
        return
    if not isinstance(bridge, Mapping):
        raise CheckpointError(f"dflash_config.{BRIDGE} is missing: the engine would serve a plain DFlash draft")
    for key, field in expected.items():
        value, wanted = bridge.get(key), settings[field]
        if value != wanted:
            raise CheckpointError(
                f"dflash_config.{BRIDGE}.{key}={value!r} contradicts dspine_config.{field}={wanted}"
            )
