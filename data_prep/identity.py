"""What decides an output beside its inputs: the code, and how a target's chats are rendered and encoded."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.files import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",  # which tokens end an answer
)

RENDERERS = ("transformers", "tokenizers", "jinja2")
"""Packages that make token ids of messages."""

SHORT = 16
"""Digits of a hash that are enough; of the target's, those that go into each record."""


@cache
def code_version() -> str:
    """A hash over all modules here: with a changed rule it is another job."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(f"{path.name} {file_sha256(path)}\n".encode())
    return total.hexdigest()[:SHORT]


def tokenizer_identity(target: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes of the tokenizer's files, by name and content, and of its chat template; versions of what uses them."""
    files = sorted({path for pattern in TOKENIZER_FILES for path in target.glob(pattern)})
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name} {file_sha256(path)}\n".encode())
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return {
        "tokenizer": total.hexdigest(),
        "chat_template": template,
        **{f"{name}_version": version(name) for name in RENDERERS},
    }


def end_ids(target: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end an answer: the tokenizer's, and those of the generation config."""
    from transformers import GenerationConfig

    ids = [tokenizer.eos_token_id]
    if (target / "generation_config.json").exists():
        more = GenerationConfig.from_pretrained(target).eos_token_id
        ids += more if isinstance(more, list) else [more]
    return frozenset(token for token in ids if token is not None)
