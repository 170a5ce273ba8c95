"""Answers that come from elsewhere, as the target would have read and written them.

Where an answer begins and ends is found by rendering: the prompt is what the target's chat template makes of the
turns before it, with the opening of an answer; the answer is what the template adds when it gets the answer too. No
pattern of role markers is involved, so it works for any template, and refuses the ones that rewrite what they were
given. Of what the template adds, only the answer's own text counts, and its end token; an empty ``<think></think>``
or a line break behind the end token is the template's, not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specforge_dspine.utils.chat_template import Message, refusals
from specforge_dspine.utils.invalid_row import InvalidRow

STAND_IN = "specforge-dspine: an answer stands here"

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rendered:
    """``prompt`` is given to the target, ``completion`` is what it would write."""

    prompt: str
    completion: str


def render_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    ends: Sequence[str],
    *,
    enable_thinking: bool | None,
    was_cut: bool,
) -> Rendered:
    """The last message, an assistant's, and what comes before it.

    Args:
        ends: texts of the tokens that end an answer.
        was_cut: whether the answer has no end of its own; then none is added.

    Raises:
        InvalidRow: the template does not render these turns, or not so that the answer can be told apart.
    """
    answer = messages[-1]
    reasoning, content = answer.get("reasoning_content", "").strip("\n"), answer["content"]
    if reasoning and enable_thinking is False:
        raise InvalidRow("reasoning in an answer without thinking", "use --thinking on, or leave such rows out")
    switch: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    prompt = _render(tokenizer, messages[:-1], switch, opens=True)
    # A stand-in for the answer shows what the template puts around it, whatever words the answer itself has.
    framed = _added(prompt, _render(tokenizer, [*messages[:-1], answer | {"content": STAND_IN}], switch, opens=False))
    opening, found, tail = framed.partition(STAND_IN)
    if reasoning and reasoning not in opening:
        raise InvalidRow("the template drops the reasoning", f"{reasoning[:60]!r}")
    added = _added(prompt, _render(tokenizer, messages, switch, opens=False))
    body = added[len(opening) : len(added) - len(tail)]
    if not found or not added.startswith(opening) or not added.endswith(tail) or body.strip() != content.strip():
        raise InvalidRow("the template rewrites the answer", f"{content[:60]!r} became {added[:60]!r}")
    closing = next((text for text in ends if tail.startswith(text)), "")
    ending = "" if was_cut else closing
    if reasoning:  # the target itself opens its reasoning
        return Rendered(prompt, opening + body + ending)
    return Rendered(prompt + opening, body + ending)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], switch: dict[str, Any], *, opens: bool
) -> str:
    with refusals():
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opens, **switch)
    assert isinstance(text, str)
    return text


def _added(prompt: str, whole: str) -> str:
    """What ``whole`` has behind ``prompt``."""
    if not whole.startswith(prompt):
        raise InvalidRow(
            "the template renders a prompt differently with its answer", f"at {_difference(prompt, whole)!r}"
        )
    return whole[len(prompt) :]


def _difference(prompt: str, whole: str) -> str:
    at = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
    return prompt[at : at + 40]
