"""Responses of a data set, as the target would have read and written them.

Where a response begins and ends is found by rendering. The prompt is what the target's chat template makes of the
turns before it, with the opening of a response; the response is what the template adds when it gets that too. No
pattern of role markers is involved, so it works for any template, and refuses those that rewrite what they were
given. Of what the template adds, only the response's own text counts, and its end token. An empty ``<think></think>``
or a line break behind the end token is the template's, not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specforge_dspine.utils.chat_template import Message, template_errors
from specforge_dspine.utils.errors import InvalidRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "specforge-dspine: an answer stands here"


def render_response(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    ends: Sequence[str],
    *,
    enable_thinking: bool | None,
    was_cut: bool,
) -> tuple[str, str]:
    """The prompt given to the target, and the completion that it would write: the last message, an assistant's.

    Args:
        ends: texts of the tokens that end a response.
        was_cut: whether the response has no end of its own; then none is added.

    Raises:
        InvalidRow: the template does not render these turns, or not so that the response can be told apart.
    """
    response = messages[-1]
    reasoning, content = response.get("reasoning_content", "").strip("\n"), response["content"]
    if reasoning and enable_thinking is False:
        raise InvalidRow("reasoning in a response without thinking", "use --thinking on, or leave such rows out")
    switch: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def render(turns: Sequence[Message], *, opens: bool = False) -> str:
        with template_errors():
            text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=opens, **switch)
        assert isinstance(text, str)
        return text

    prompt = render(messages[:-1], opens=True)
    # A placeholder shows what the template puts around the response, whatever words the response itself has.
    framed = _added(prompt, render([*messages[:-1], response | {"content": PLACEHOLDER}]))
    opening, found, tail = framed.partition(PLACEHOLDER)
    if reasoning and reasoning not in opening:
        raise InvalidRow("the template drops the reasoning", f"{reasoning[:60]!r}")
    added = _added(prompt, render(messages))
    body = added[len(opening) : len(added) - len(tail)]
    if not found or not added.startswith(opening) or not added.endswith(tail) or body.strip() != content.strip():
        raise InvalidRow("the template rewrites the response", f"{content[:60]!r} became {added[:60]!r}")
    ending = "" if was_cut else next((text for text in ends if tail.startswith(text)), "")
    if reasoning:  # the target itself opens its reasoning
        return prompt, opening + body + ending
    return prompt + opening, body + ending


def _added(prompt: str, whole: str) -> str:
    """What ``whole`` has behind ``prompt``."""
    if not whole.startswith(prompt):
        at = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
        reason = "the template renders a prompt differently with its response"
        raise InvalidRow(reason, f"at {prompt[at : at + 40]!r}")
    return whole[len(prompt) :]
