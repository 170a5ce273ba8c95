"""Small things that several tests need: a tokenizer for the tiny targets, training samples, a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

ENTRIES = 250  # of the tiny tokenizer: rows 250.. of the tiny targets' 256 are padding, and 250 is the mask


def save_tokenizer(path: Path, entries: int = ENTRIES) -> Path:
    """A word-level tokenizer of ``entries`` words, saved into ``path``."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, entries)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(path)
    return path


def write_samples(path: Path, count: int = 24, *, length: int = 40, prompt: int = 8, seed: int = 0) -> Path:
    """A JSONL file of ``count`` pre-tokenized samples with ids 3.. below ENTRIES."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w", encoding="utf-8") as stream:
        for index in range(count):
            size = length - int(torch.randint(0, length // 2, (), generator=generator))
            ids = torch.randint(3, ENTRIES, (size,), generator=generator).tolist()
            mask = [0] * prompt + [1] * (size - prompt)
            stream.write(json.dumps({"id": f"s{index}", "input_ids": ids, "loss_mask": mask}) + "\n")
    return path


def poison_samples(source: Path, path: Path, token: int, *, every: int = 4) -> Path:
    """The samples of ``source`` with ``token`` in the first of ``every`` so many, and in no other."""
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    for index, sample in enumerate(lines):
        ids = [3 if entry == token else entry for entry in sample["input_ids"]]
        sample["input_ids"] = [*ids[:10], token, *ids[11:]] if index % every == 0 else ids
    path.write_text("".join(json.dumps(sample) + "\n" for sample in lines), encoding="utf-8")
    return path


def tiny_recipe(target: Path, run_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe document for a tiny target on the CPU; ``sections`` are merged into it."""
    document: dict[str, Any] = {
        "model": {"target_model_path": str(target), "torch_dtype": "float32"},
        "data": {"max_length": 64, "cache_dir": str(run_dir.parent / "cache"), "dataloader_num_workers": 0},
        "dspine": {
            "num_hidden_layers": 2,
            "block_size": 4,
            "target_layer_ids": [0, 2, 4],
            "transfer_rank": 16,
            "message_size": 8,
            "top_k": 4,
            "replacement_layers": 1,
        },
        "training": {
            "max_steps": 4,
            "batch_size": 2,
            "num_anchors": 6,
            "loss_decay_gamma": 7.0,
            "objective_chunk_blocks": 4,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.25,
            "fsdp_sharding": "NO_SHARD",
            "attention_backend": "sdpa",
            "log_interval": 1,
            "seed": 7,
        },
        "run_id": "tiny",
        "output_dir": str(run_dir),
    }
    for section, values in sections.items():
        document[section] = document.get(section, {}) | values
    return document
