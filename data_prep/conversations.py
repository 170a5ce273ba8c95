"""Says of every entry of foreign chat data what it is: a conversation, or why not.

Understood are

    {"conversations": [{"from", "value"}, ...]}          ShareGPT, Open-PerfectBlend
    {"messages": [{"role", "content"}, ...]}             OpenAI, UltraChat 200k
    {"data": [user, assistant, user, ...]}               UltraChat
    {"prompt" | "question" | "problem": str}             a single question
    {"instruction": str, "input": str}                   Alpaca
    {"text": str}                                        a chat rendered with ChatML's or Llama 3's markers

A conversation is an optional system message, then user and assistant in turn. Anything else is an
:class:`OddEntry`, to be counted and reported, neither repaired nor passed on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data_prep.chat import THINK_CLOSE, Message, split_reasoning
from data_prep.entries import OddEntry

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = {"tool", "function", "function_call", "observation", "tool_call", "tool_response", "ipython"}
TOOL_FIELDS = ("tool_calls", "function_call")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
SPECIAL_FIELDS = frozenset(TOOL_FIELDS + REASONING_FIELDS)
LISTS = ("conversations", "messages", "data")
QUESTIONS = ("prompt", "question", "problem")
FIELDS = (*LISTS, *QUESTIONS, "instruction", "text")

MARKED_TURNS = (
    re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.S),
    re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(?:<\|eot_id\|>|\Z)", re.S),
)
"""Turns of a preformatted text; the last one may lack its end."""


def read_conversation(entry: Any) -> list[Message]:
    """All messages of one entry. Reasoning, in a field of its own or in ``<think>``, is in ``"reasoning_content"``.

    Raises:
        OddEntry: for anything that is not a conversation (the module says what is one).
    """
    if isinstance(entry, OddEntry):
        raise entry
    if not isinstance(entry, dict):
        raise OddEntry("not a JSON object", type(entry).__name__)
    messages = [_message(raw, at) for at, raw in enumerate(_raw_messages(entry))]
    _check_turns(messages)
    return messages


def read_messages(entry: Any, max_turns: int | None = None) -> list[Message]:
    """The messages of one entry up to its last user turn, at most ``max_turns`` user turns (None: all).

    Raises:
        OddEntry: as :func:`read_conversation`.
    """
    messages = read_conversation(entry)
    start = 1 if messages[0]["role"] == "system" else 0
    kept = messages if max_turns is None else messages[: start + 2 * max_turns - 1]
    return kept if kept[-1]["role"] == "user" else kept[:-1]


def user_turns(messages: Sequence[Message]) -> list[str]:
    """What the user says, turn by turn."""
    return [message["content"] for message in messages if message["role"] == "user"]


def _raw_messages(entry: dict[str, Any]) -> list[Any]:
    # Tables have every column in every row: what is null there is not given.
    name = next((name for name in FIELDS if entry.get(name) is not None), None)
    name = name or next((name for name in FIELDS if name in entry), None)
    if name is None:
        raise OddEntry(f"none of the fields {', '.join(FIELDS)}", f"has {', '.join(sorted(entry))[:200]}")
    value = entry[name]
    if name in LISTS:
        return _listed(name, value)
    if name == "text":
        return _marked(value)
    if name == "instruction" and entry.get("input"):
        more = entry["input"]
        if not isinstance(value, str) or not isinstance(more, str):
            raise OddEntry("content is not text", f"instruction or input is {type(more).__name__}")
        value = f"{value}\n\n{more}"
    return [{"role": "user", "content": value}]


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise OddEntry("the conversation is not a list", f"{name} is {type(value).__name__}")
    if not value:
        raise OddEntry("empty conversation", f"{name} is []")
    if name == "data":
        roles = ("user", "assistant") * len(value)
        return [{"role": role, "content": turn} for role, turn in zip(roles, value, strict=False)]
    return value


def _marked(text: Any) -> list[Any]:
    if not isinstance(text, str):
        raise OddEntry("content is not text", f"text is {type(text).__name__}")
    for pattern in MARKED_TURNS:
        turns = pattern.findall(text)
        if turns:
            answered = turns[:-1] if not turns[-1][1].strip() else turns  # a prompt ends with an opened answer
            return [{"role": role, "content": content} for role, content in answered]
    raise OddEntry("text without turns", "no ChatML or Llama 3 markers in it; a plain question belongs into prompt")


def _message(raw: Any, at: int) -> Message:
    if not isinstance(raw, dict):
        raise OddEntry("a message is not a JSON object", f"message {at} is {type(raw).__name__}")
    name, content = raw.get("role"), raw.get("content")
    if name is None:
        name, content = raw.get("from"), raw.get("value")
    role = ROLES.get(name) if isinstance(name, str) else None
    more = SPECIAL_FIELDS.intersection(raw)
    if (more and any(raw.get(field) for field in TOOL_FIELDS)) or (role is None and name in TOOL_ROLES):
        raise OddEntry("tool calls", f"message {at} ({name}); no tool can be run here")
    if role is None:
        raise OddEntry("unknown role", f"message {at}: {name!r}")
    if content is None:
        raise OddEntry("no content", f"message {at} ({name}): null or missing")
    if not isinstance(content, str):
        raise OddEntry("content is not text", f"message {at} ({name}): {type(content).__name__}")
    if not content or content.isspace():
        raise OddEntry("no content", f"message {at} ({name}): only white space")
    if role == "assistant" and (more or THINK_CLOSE in content):
        return _with_reasoning(raw, content)
    return {"role": role, "content": content}


def _with_reasoning(raw: dict[str, Any], content: str) -> Message:
    reasoning = next((raw[name] for name in REASONING_FIELDS if isinstance(raw.get(name), str)), "")
    if not reasoning:
        reasoning, content = split_reasoning(content)
    message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reasoning} if reasoning.strip() else message


def _check_turns(messages: list[Message]) -> None:
    start = 1 if messages[0]["role"] == "system" else 0
    if len(messages) == start:
        raise OddEntry("system message only")
    for at, message in enumerate(messages[start:], start):
        expected = "user" if (at - start) % 2 == 0 else "assistant"
        role = message["role"]
        if role == expected:
            continue
        if at == start:
            raise OddEntry(f"{role} first", f"message {at}")
        if role == "system":
            raise OddEntry("system message in the middle", f"message {at}")
        raise OddEntry(f"two {role} turns in a row", f"messages {at - 1} and {at}")
