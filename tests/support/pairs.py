"""A tiny target and a draft that fits it, in this process."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.target_backends import ModelTarget
from specforge_dspine.modeling.draft_config import small_draft_config
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.modeling.transfer_space import build_transfer_space

HIDDEN, LAYERS, TAPS = 16, 3, (0, 1)


def tiny_target(vocab: int, *, seed: int = 0, spread: float = 0.35) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights; a larger ``spread`` makes its next tokens surer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HIDDEN // 2,
        max_position_embeddings=256,
        initializer_range=spread,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).float().eval()


def tiny_drafter(
    target: Qwen3ForCausalLM, *, seed: int = 1, block: int = 4, top_k: int = 4, **options: object
) -> BlockDrafter:
    """A draft whose every part has random weights, the injection included; its mask is the last row."""
    torch.manual_seed(seed)
    vocab = target.config.vocab_size
    settings = DSpineSettings(transfer_rank=4, message_size=8, top_k=top_k, replacement_layers=1, **options)
    config = small_draft_config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HIDDEN // 2,
        intermediate_size=2 * HIDDEN,
        rms_norm_eps=1e-6,
        theta=1e4,
        block_size=block,
        target_layer_ids=TAPS,
        num_target_layers=LAYERS,
        mask_token_id=vocab - 1,
        settings=settings,
    )
    config._attn_implementation = "sdpa"
    draft = DSpineDraftModel(config).float()
    head = target.get_output_embeddings().weight.detach()
    if settings.has_readouts:
        draft.set_transfer_space(build_transfer_space(head, settings.transfer_rank))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return BlockDrafter(draft, head, target.get_input_embeddings().weight.detach())


def verifier(target: Qwen3ForCausalLM) -> ModelTarget:
    """The target as it verifies."""
    return ModelTarget(target, TAPS)
