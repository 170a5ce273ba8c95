"""Messages as token ids and back: exactly what a served target reads and writes, nothing else.

A chat template may render the same turn differently later on (Qwen3's drops the reasoning of earlier turns), so there
is no one token sequence of a whole chat that a server ever saw. Hence one training sample per response: the prompt
ids that were sent, then the ids that came back, never encoded again. Only the latter are supervised. Whatever the
template writes belongs to the prompt (SpecForge#296: an empty ``<think></think>`` that it adds was trained on).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": str}``; an assistant's may have ``"reasoning_content"``."""
THINKING = {"on": True, "off": False, "none": None}
"""A template's switch, by the words of the command line; none leaves its default."""
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
OPENING_TOKENS = 16
"""So many of a prompt's last tokens show whether it opens the reasoning itself."""


def check_template(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> None:
    """Refuse a tokenizer without chat template, and a thinking switch that its template does not know.

    Raises:
        ValueError: the message says what to set instead.
    """
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template; use an instruction-tuned target")
    if enable_thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError(
            f"enable_thinking = {enable_thinking}, but the target's chat template has no such switch "
            "(a template would ignore it silently): use thinking none"
        )


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, history: Sequence[Message], *, enable_thinking: bool | None
) -> list[int]:
    """The ids a server would read for ``history`` (ending with a user turn), with the opening of a response.

    ``enable_thinking`` None leaves the template's own default; with False, Qwen3's template closes an
    empty reasoning block here, in the prompt.

    Raises:
        ValueError: ``history`` does not end with a user turn.
        InvalidRow: the template refuses ``history``.
    """
    if not history or history[-1]["role"] != "user":
        raise ValueError(f"a prompt must end with a user turn, not with {history[-1:]}")
    switch: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    with template_errors():
        ids = tokenizer.apply_chat_template(
            list(history), add_generation_prompt=True, tokenize=True, return_dict=False, **switch
        )
    return list(ids)


@contextlib.contextmanager
def template_errors() -> Iterator[None]:
    """Around a rendering: templates refuse roles, orders or a system message that they do not know.

    Raises:
        InvalidRow: with the template's words.
    """
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError) as error:
        raise InvalidRow("the template refuses these turns", str(error)) from error


def response_text(tokenizer: PreTrainedTokenizerBase, output_ids: Sequence[int]) -> str:
    """A response as a chat client would put it into the history: without end or other special tokens."""
    text = tokenizer.decode(list(output_ids), skip_special_tokens=True)
    assert isinstance(text, str)  # a list only for a batch
    return text


def unfinished_reasoning(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether a response was cut off while the target was still thinking, so that it answers nothing.

    Some templates open the reasoning at the end of the prompt, and then the response holds no opening of its own.
    """
    opening, text = (tokenizer.decode(list(ids)) for ids in (prompt[-OPENING_TOKENS:], output))
    assert isinstance(opening, str) and isinstance(text, str)  # lists only for a batch
    return (THINK_OPEN in text or opening.rstrip().endswith(THINK_OPEN)) and THINK_CLOSE not in text


def split_reasoning(content: str) -> tuple[str, str]:
    """A response's reasoning and the rest of it, as Qwen3's template tells them apart."""
    before, closed, after = content.rpartition(THINK_CLOSE)
    if not closed:
        return "", content
    return before.rpartition(THINK_OPEN)[2].strip("\n"), after.lstrip("\n")


TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",  # which tokens end a response
)
RENDERERS = ("transformers", "tokenizers", "jinja2")
"""Packages that turn messages into token ids."""
SHORT = 16
"""Digits of a hash that are enough; of the target's, those that go into each record."""


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
    """Ids of the tokens that end a response, as in SGLang: the tokenizer's and those of both configs."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(target)
    sources = [tokenizer, config, config.get_text_config()]
    if (target / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(target))
    ends = (getattr(source, "eos_token_id", None) for source in sources)
    return frozenset(
        token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None
    )
