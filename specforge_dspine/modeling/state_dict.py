"""Names and shapes of a draft's tensors, and their check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.utils.errors import CheckpointError

TABLE, READY = "transfer_codes", "transfer_ready"
UNIT_TOLERANCE = 1e-3  # of the norm of a code


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a draft with ``config`` by name: the only ones a checkpoint may hold."""
    settings, layers = settings_of(config), config.num_hidden_layers
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    taps, rank, message = len(config.dflash_config["target_layer_ids"]), settings.transfer_rank, settings.message_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if settings.has_readouts:
        shapes |= {TABLE: (config.vocab_size, rank), READY: ()}
        shapes |= {f"injection.readouts.{i}.weight": (rank, hidden) for i in range(layers)}
    if settings.injection:
        shapes |= {
            "injection.message.weight": (message, rank),
            "injection.receiver_gate.weight": (message, rank),
            "injection.predecessor_gate.weight": (message, rank),
            "injection.bias": (message,),
        }
        shapes |= {f"injection.writes.{i}.weight": (hidden, message) for i in range(layers)}
    for i in range(layers):
        shapes |= {
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


def check_tensors(tensors: Mapping[str, Tensor], config: Any) -> None:
    """Raise ``CheckpointError`` unless every tensor is there, of its shape, floating and finite, and no other.

    Where the variant has a code table, it must pass ``check_table`` and be marked as ready.
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
        if name == READY:
            continue
        if not value.is_floating_point():
            raise CheckpointError(f"{name} is {value.dtype}; weights must be of a floating dtype")
        if not torch.isfinite(value).all():
            raise CheckpointError(f"{name} holds a value that is not finite")
    if READY not in shapes:
        return
    if tensors[READY].dtype is not torch.bool or not bool(tensors[READY]):
        raise CheckpointError(f"{READY} is not True: the code table was never installed")
    check_table(tensors[TABLE])


def check_table(table: Tensor) -> None:
    """Raise ``CheckpointError`` unless ``table`` C [V, r] is float32, of unit rows, and was never cast to 16 bits.

    A row has norm 0 if the row of the head equals the mean.
    """
    if table.dtype is not torch.float32:
        raise CheckpointError(f"{TABLE} is {table.dtype}, and must be float32")
    norms = table.norm(dim=1)
    if bool(((norms - 1).abs() > UNIT_TOLERANCE).logical_and(norms > 0).any()) or not norms.any():
        raise CheckpointError(f"{TABLE} has rows of norm {norms.min():.4g} to {norms.max():.4g}, codes have norm 1")
    if table.shape[1] > 1 and torch.equal(table, table.to(torch.bfloat16).float()):
        raise CheckpointError(f"{TABLE} holds bfloat16 values in float32: it was cast on the way and is damaged")
