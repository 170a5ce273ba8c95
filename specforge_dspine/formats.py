"""Checkpoint formats: the draft's tensors, the two flavours of config.json, and what each must hold.

    specforge   architectures ["DSpineDraftModel"]; loads with DSpineDraftModel.from_pretrained
    sglang      architectures ["DFlashDraftModel"] and dflash_config.selected_prefix_code_bridge, which makes the
                serving plugin load it as DSpine

``SGLANG_LAYOUT`` is the one table to correct when a released checkpoint can be read: the bridge's own keys and
the file layout of that flavour are not published.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specforge_dspine.config import ARCHITECTURE, rope_theta, settings_of

TABLE, READY = "transfer_codes", "transfer_ready"
FLAVOURS = ("sglang", "specforge")
BRIDGE = "selected_prefix_code_bridge"
WEIGHTS = "model.safetensors"


class Layout(NamedTuple):
    """A flavour on disk: its architecture name, and the bridge's keys → where their values come from."""

    architecture: str
    bridge: dict[str, str] | None  # key → name of a DSpineSettings field


# vLLM names the sizes transfer_dim and message_dim; the rest is our reading. UNVERIFIED against the released plugin.
SGLANG_LAYOUT = Layout(
    "DFlashDraftModel",
    {"transfer_dim": "transfer_rank", "message_dim": "message_size", "top_k": "top_k"},
)
LAYOUTS = {"sglang": SGLANG_LAYOUT, "specforge": Layout(ARCHITECTURE, None)}


class CheckpointError(ValueError):
    """A checkpoint that must not be used; the message names the tensor, key or flag."""


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft with ``config`` by name: the only ones a checkpoint may hold."""
    settings, layers = settings_of(config), config.num_hidden_layers
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    taps, rank, message = len(config.dflash_config["target_layer_ids"]), settings.transfer_rank, settings.message_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "injection.message.weight": (message, rank),
        "injection.receiver_gate.weight": (message, rank),
        "injection.predecessor_gate.weight": (message, rank),
        "injection.bias": (message,),
        TABLE: (config.vocab_size, rank),
        READY: (),
    }
    for i in range(layers):
        shapes |= {
            f"injection.readouts.{i}.weight": (rank, hidden),
            f"injection.writes.{i}.weight": (hidden, message),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (queries, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{i}.self_attn.q_norm.weight": (head_dim,),
            f"layers.{i}.self_attn.k_norm.weight": (head_dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def check_tensors(tensors: dict[str, Tensor], config: Any) -> None:
    """Every tensor present, of its shape, finite; the table float32, unit rows and ready.

    Raises:
        CheckpointError: with the tensor's name.
    """
    shapes = expected_shapes(config)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise CheckpointError(f"missing tensors: {', '.join(missing)}")
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise CheckpointError(f"unknown tensors: {', '.join(extra)}")
    for name, shape in shapes.items():
        value = tensors[name]
        if tuple(value.shape) != shape:
            raise CheckpointError(f"{name} is {tuple(value.shape)}, the config says {shape}")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise CheckpointError(f"{name} holds a value that is not finite")
    if tensors[TABLE].dtype is not torch.float32:
        raise CheckpointError(f"{TABLE} is {tensors[TABLE].dtype}, and must be float32")
    if tensors[READY].dtype is not torch.bool or not bool(tensors[READY]):
        raise CheckpointError(f"{READY} is not True: the code table was never installed")


def flavour_config(payload: dict[str, Any], config: Any, flavour: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of ``flavour`` from the draft's own config (``payload`` is its dictionary)."""
    layout, settings = LAYOUTS[flavour], settings_of(config)
    theta = rope_theta(config)
    out = {
        key: value
        for key, value in payload.items()
        if key not in ("auto_map", "_name_or_path", "transformers_version")
    }
    out |= {
        "architectures": [layout.architecture],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "is_causal": True,
        "rope_theta": theta,
        "rope_parameters": dict(payload.get("rope_parameters") or {"rope_type": "default"}) | {"rope_theta": theta},
        "tie_word_embeddings": False,
        "dflash_config": dict(payload["dflash_config"]) | {"block_size": config.block_size, "causal": True},
    }
    out["dflash_config"].pop(BRIDGE, None)
    if layout.bridge is not None:
        out["dflash_config"][BRIDGE] = {key: getattr(settings, field) for key, field in layout.bridge.items()}
    return out


def check_config(payload: dict[str, Any]) -> str:
    """The flavour of a config.json, every flag that an engine would otherwise guess being present.

    Raises:
        CheckpointError: a missing bridge or flag, or an id out of range, by name.
    """
    architectures = payload.get("architectures")
    flavours = [name for name, layout in LAYOUTS.items() if architectures == [layout.architecture]]
    if not flavours:
        raise CheckpointError(
            f"architectures={architectures}: expected one of {[la.architecture for la in LAYOUTS.values()]}"
        )
    flavour, dflash = flavours[0], payload.get("dflash_config") or {}
    required = ("block_size", "num_target_layers", "layer_types", "vocab_size", "rope_theta", "rope_parameters")
    for key in required:
        if payload.get(key) is None:
            raise CheckpointError(f"{key} is missing from config.json")
    if payload.get("is_causal") is not True:
        raise CheckpointError("is_causal is not true: SGLang would serve the draft with bidirectional blocks")
    if dflash.get("causal") is not True:
        raise CheckpointError(
            "dflash_config.causal is not true: vLLM would serve the draft with bidirectional blocks"
        )
    for key in ("mask_token_id", "target_layer_ids", "block_size"):
        if dflash.get(key) is None:
            raise CheckpointError(f"dflash_config.{key} is missing")
    if dflash["block_size"] != payload["block_size"]:
        raise CheckpointError(
            f"block_size {payload['block_size']} differs from dflash_config's {dflash['block_size']}"
        )
    if not 0 <= dflash["mask_token_id"] < payload["vocab_size"]:
        raise CheckpointError(f"dflash_config.mask_token_id={dflash['mask_token_id']} is outside the vocabulary")
    layers, ids = payload["num_target_layers"], dflash["target_layer_ids"]
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= layers - 2:
        raise CheckpointError(f"dflash_config.target_layer_ids={ids}: increasing ids in 0..{layers - 2} are needed")
    if payload.get("dspine_config") is None:
        raise CheckpointError("dspine_config is missing")
    bridge = LAYOUTS[flavour].bridge
    if bridge is not None:
        found = dflash.get(BRIDGE)
        if not found:
            raise CheckpointError(f"dflash_config.{BRIDGE} is missing: the engine would serve a plain DFlash draft")
        for key, field in bridge.items():
            if found.get(key) != payload["dspine_config"].get(field):
                raise CheckpointError(f"{BRIDGE}.{key}={found.get(key)!r} contradicts dspine_config.{field}")
    elif BRIDGE in dflash:
        raise CheckpointError(f"dflash_config.{BRIDGE} belongs to the sglang flavour, not to {architectures}")
    return flavour
