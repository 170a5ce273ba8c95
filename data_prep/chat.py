"""From messages to token ids and back: exactly what a served target reads and writes, nothing else.

A chat template may render the same turn differently later on (Qwen3's drops the reasoning of earlier
turns), so there is no one token sequence of a whole chat that a server ever saw. Hence one training sample
per answer: the prompt ids that were sent, followed by the ids that came back, never encoded again. Only
the latter are supervised; whatever the template writes belongs to the prompt (SpecForge#296: an empty
``<think></think>`` that the template adds was trained on).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reading prompts needs none, and imports should not take seconds
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": str}``; an assistant's may have ``"reasoning_content"``."""

THINKING = {"on": True, "off": False, "none": None}
"""What commands call a template's switch; none leaves its default."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def check_template(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> None:
    """Refuses a tokenizer without chat template, and a thinking switch that its template does not know.

    Raises:
        ValueError: says what to set instead.
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
    """The ids a server would read for ``history`` (ending with a user turn), with the opening of an answer.

    ``enable_thinking`` None leaves the template's own default; with False, Qwen3's template closes an
    empty reasoning block here, in the prompt.

    Raises:
        ValueError: ``history`` does not end with a user turn.
    """
    if not history or history[-1]["role"] != "user":
        raise ValueError(f"a prompt must end with a user turn, not with {history[-1:]}")
    switch: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    ids = tokenizer.apply_chat_template(
        list(history), add_generation_prompt=True, tokenize=True, return_dict=False, **switch
    )
    return list(ids)


def answer_text(tokenizer: PreTrainedTokenizerBase, output_ids: Sequence[int]) -> str:
    """An answer as a chat client would put it into the history: without end or other special tokens."""
    text = tokenizer.decode(list(output_ids), skip_special_tokens=True)
    assert isinstance(text, str)  # a list only for a batch
    return text


def unfinished_reasoning(text: str) -> bool:
    """Whether an answer was cut off while the target was still thinking, so that it answers nothing."""
    return THINK_OPEN in text and THINK_CLOSE not in text


def split_reasoning(content: str) -> tuple[str, str]:
    """An answer's reasoning and the rest of it, as Qwen3's template tells them apart."""
    before, closed, after = content.rpartition(THINK_CLOSE)
    if not closed:
        return "", content
    return before.rpartition(THINK_OPEN)[2].strip("\n"), after.lstrip("\n")
