"""Tiny random-weight targets, saved as Hugging Face model directories.

Every weight is drawn wide enough that logits differ clearly from token to token, and the final norm's
weights are far from 1, so that states from before and after it cannot be mistaken for each other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB, HIDDEN, LAYERS = 256, 64, 6
EOS = 2

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def build_qwen3(path: Path, *, seed: int = 0, poisoned_token: int | None = None) -> Path:
    """A Qwen3 target with an untied head; returns ``path``.

    ``poisoned_token`` gets a NaN embedding, so that the states of a sequence with it are NaN.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=False))
    if poisoned_token is not None:
        model.model.embed_tokens.weight.data[poisoned_token] = torch.nan
    return _save(model, path)


def build_llama(path: Path, *, seed: int = 0) -> Path:
    """A Llama-shaped target whose head is its embedding; returns ``path``."""
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)), path)


BUILDERS = {"qwen3": build_qwen3, "llama": build_llama}


def _save(model: PreTrainedModel, path: Path) -> Path:
    with torch.no_grad():
        norm = model.model.norm.weight
        norm.copy_(torch.rand_like(norm) * 1.5 + 0.25)
    model.float().save_pretrained(path)
    return path
