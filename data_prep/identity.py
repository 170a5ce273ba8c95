"""What of a target decides how chats are rendered and encoded, as hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.files import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")

SHORT = 16
"""Digits of a target's fingerprint that go into each record."""


def tokenizer_identity(target: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes of the tokenizer's files, by name and content, and of its chat template."""
    files = sorted({path for pattern in TOKENIZER_FILES for path in target.glob(pattern)})
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name} {file_sha256(path)}\n".encode())
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return {"tokenizer": total.hexdigest(), "chat_template": template}


def end_ids(target: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end an answer: the tokenizer's, and those of the generation config."""
    from transformers import GenerationConfig

    ids = [tokenizer.eos_token_id]
    if (target / "generation_config.json").exists():
        more = GenerationConfig.from_pretrained(target).eos_token_id
        ids += more if isinstance(more, list) else [more]
    return frozenset(token for token in ids if token is not None)
