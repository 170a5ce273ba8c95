"""Tiny targets that chat: Qwen3 with its true tokenizer and template, and a Llama with SmolLM2's template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.support.qwen3_tokenizer import qwen3_chat_tokenizer

QWEN3_ROWS = 151936
SMOLLM2_ROWS = 288

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>'"
    " + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2-Instruct (Apache-2.0)."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}


def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and ChatML markers, with SmolLM2's template; its pad token is its end token, as there."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unused>"]
    backend = Tokenizer(models.BPE({token: k for k, token in enumerate([*special, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = SMOLLM2
    return tokenizer


def build_chat_target(name: str, path: Path) -> Path:
    """The target "qwen3" or "smollm2", whose responses end by themselves now and then."""
    torch.manual_seed(1)
    is_qwen = name == "qwen3"
    tokenizer = qwen3_chat_tokenizer() if is_qwen else smollm2_tokenizer()
    rows = QWEN3_ROWS if is_qwen else SMOLLM2_ROWS
    ids = {"vocab_size": rows, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    config = (Qwen3Config if is_qwen else LlamaConfig)(**SIZES, **ids, tie_word_embeddings=False)
    model = (Qwen3ForCausalLM if is_qwen else LlamaForCausalLM)(config)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 1.5
        model.lm_head.weight[len(tokenizer) :] = 0  # rows that no text has
    model.float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
