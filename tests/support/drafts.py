"""Tiny drafts and batches for tests of the method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.modeling.draft_config import small_draft_config
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineSettings, settings_of
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.objective.training_model import DSpineTrainingModel

VOCAB, HIDDEN, TAPS, MASK_ID = 70, 32, 2, 63


def make_model(
    *,
    layers: int = 3,
    block: int = 5,
    replacement_layers: int = 2,
    seed: int = 0,
    trained: bool = True,
    dtype: torch.dtype = torch.float64,
    vocab: int = VOCAB,
    **options: object,
) -> DSpineTrainingModel:
    """A training model in float64; ``trained`` gives the injection and all norms weights that matter."""
    torch.manual_seed(seed)
    settings = DSpineSettings(
        transfer_rank=12, message_size=8, top_k=6, replacement_layers=replacement_layers, **options
    )
    draft = DSpineDraftModel(
        small_draft_config(
            vocab_size=vocab,
            hidden_size=HIDDEN,
            layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            rms_norm_eps=1e-6,
            theta=10000.0,
            block_size=block,
            target_layer_ids=range(TAPS),
            num_target_layers=6,
            mask_token_id=MASK_ID,
            settings=settings,
        )
    ).to(dtype)
    head = torch.randn(vocab, HIDDEN, dtype=dtype)
    if settings.has_readouts:
        draft.set_transfer_space(build_transfer_space(head, settings.transfer_rank, dtype=dtype))
    if trained:
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    linear = nn.Linear(HIDDEN, vocab, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(head)
    return DSpineTrainingModel(
        draft,
        linear,
        nn.Embedding(vocab, HIDDEN, dtype=dtype),
        attention_backend="sdpa",
        num_anchors=4,
        loss_decay_gamma=7.0,
        objective_chunk_blocks=1,
        normalization="separate",
    )


def make_batch(
    rows: int = 2, length: int = 20, *, seed: int = 1, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """input_ids, loss_mask [R, S], hidden_states [R, S, T·H], target_last_hidden_states [R, S, H]."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[:, :4] = 0
    return {
        "input_ids": torch.randint(0, MASK_ID, (rows, length), generator=generator),
        "loss_mask": mask,
        "hidden_states": torch.randn(rows, length, TAPS * HIDDEN, generator=generator, dtype=dtype),
        "target_last_hidden_states": torch.randn(rows, length, HIDDEN, generator=generator, dtype=dtype),
    }


def make_blocks(anchors: list[list[int]], replaced: list[list[bool]] | None = None) -> Blocks:
    """Blocks from ragged lists of anchors, padded."""
    width = max(map(len, anchors))
    blocks = Blocks(*(torch.zeros(len(anchors), width, dtype=kind) for kind in (torch.long, torch.bool, torch.bool)))
    for row, positions in enumerate(anchors):
        blocks.anchors[row, : len(positions)] = torch.tensor(positions)
        blocks.keep[row, : len(positions)] = True
        if replaced is not None:
            blocks.replaced[row, : len(positions)] = torch.tensor(replaced[row])
    return blocks


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a draft with ``config`` by its published name."""
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
        shapes |= {"transfer_codes": (config.vocab_size, rank), "transfer_ready": ()}
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
