"""Conversations out of entries of chat data in any usual shape.

Understood are

    {"conversations": [{"from", "value"}, ...]}          ShareGPT, Open-PerfectBlend
    {"messages": [{"role", "content"}, ...]}             OpenAI, UltraChat 200k
    {"data": [user, assistant, user, ...]}               UltraChat
    {"prompt" | "question" | "problem": str}             a single question
    {"instruction": str, "input": str}                   Alpaca
    {"text": str}                                        a chat rendered with ChatML's or Llama 3's markers

A text in "output", "response" or "completion" beside a single question or an instruction is its response. A text in
"system" or "system_prompt" beside any of them is the system message. A conversation is an optional system message,
then user and assistant in turn. Anything else is an ``InvalidRow``, neither repaired nor passed on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from specforge_dspine.utils.chat_template import THINK_CLOSE, Message, split_reasoning
from specforge_dspine.utils.errors import InvalidRow

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
}
TOOL_ROLES = {"tool", "function", "function_call", "observation", "tool_call", "tool_response", "ipython"}
TOOL_FIELDS = ("tool_calls", "function_call")
TOOL_LISTS = ("tools", "functions")
NO_TOOLS = ("", "[]", "null")  # of a table of strings
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
SPECIAL_FIELDS = frozenset(TOOL_FIELDS + REASONING_FIELDS)
LISTS = ("conversations", "messages", "data")
QUESTIONS = ("prompt", "question", "problem")
FIELDS = (*LISTS, *QUESTIONS, "instruction", "text")
RESPONSES = ("output", "response", "completion")
SYSTEMS = ("system", "system_prompt")


class Markers(NamedTuple):
    """What surrounds each turn of a preformatted text; ``begin`` may come before the first."""

    begin: re.Pattern[str]
    opening: re.Pattern[str]
    closing: str


MARKERS = (
    Markers(re.compile(r""), re.compile(r"\s*<\|im_start\|>(\w+)\n"), "<|im_end|>"),
    Markers(
        re.compile(r"\s*(<\|begin_of_text\|>)?"),
        re.compile(r"\s*<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n"),
        "<|eot_id|>",
    ),
)
BLANK = re.compile(r"\s*")
SHOWN = 40  # characters of a text that a detail quotes


def read_conversation(entry: Any) -> list[Message]:
    """All messages of one entry; an InvalidRow if it is no conversation, as the module describes them.

    Reasoning, in a field of its own or in ``<think>``, is in ``"reasoning_content"``.
    """
    if isinstance(entry, InvalidRow):
        raise entry
    if not isinstance(entry, dict):
        raise InvalidRow("not a JSON object", type(entry).__name__)
    if any(_has_tools(entry.get(name)) for name in TOOL_LISTS):
        raise InvalidRow("tool calls", "the conversation has tools; none can be run here")
    messages = [_message(raw, at) for at, raw in enumerate(_raw_messages(entry))]
    messages = _with_system(entry, messages)
    _check_turns(messages)
    return messages


def read_messages(entry: Any, max_turns: int | None = None) -> list[Message]:
    """As ``read_conversation``, but up to the last user turn, and at most ``max_turns`` user turns (None: all)."""
    messages = read_conversation(entry)
    start = 1 if messages[0]["role"] == "system" else 0
    kept = messages if max_turns is None else messages[: start + 2 * max_turns - 1]
    return kept if kept[-1]["role"] == "user" else kept[:-1]


def user_turns(messages: Sequence[Message]) -> list[str]:
    """The user's messages, in order."""
    return [message["content"] for message in messages if message["role"] == "user"]


def _raw_messages(entry: dict[str, Any]) -> list[Any]:
    # Tables have every column in every row: what is null there is not given.
    name = next((name for name in FIELDS if entry.get(name) is not None), None)
    name = name or next((name for name in FIELDS if name in entry), None)
    if name is None:
        raise InvalidRow(f"none of the fields {', '.join(FIELDS)}", f"has {', '.join(sorted(entry))[:200]}")
    value = entry[name]
    if name in LISTS:
        return _turns_in_list(name, value)
    if name == "text":
        return _turns_in_text(value)
    if name == "instruction" and entry.get("input"):
        more = entry["input"]
        if not isinstance(value, str) or not isinstance(more, str):
            raise InvalidRow("content is not text", f"instruction or input is {type(more).__name__}")
        value = f"{value}\n\n{more}"
    texts = (entry.get(field) for field in RESPONSES)
    response = next((text for text in texts if isinstance(text, str) and not BLANK.fullmatch(text)), None)
    question = {"role": "user", "content": value}
    return [question] if response is None else [question, {"role": "assistant", "content": response}]


def _has_tools(value: Any) -> bool:
    return value.strip() not in NO_TOOLS if isinstance(value, str) else bool(value)


def _with_system(entry: dict[str, Any], messages: list[Message]) -> list[Message]:
    """``messages`` after the system message that stands beside them, if one does."""
    name = next((name for name in SYSTEMS if entry.get(name)), None)
    if name is None or (isinstance(entry[name], str) and BLANK.fullmatch(entry[name])):
        return messages
    system = entry[name]
    if not isinstance(system, str):
        raise InvalidRow("content is not text", f"{name} is {type(system).__name__}")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise InvalidRow("two system messages", f"{name} and message 0 differ")
    return messages


def _turns_in_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRow("the conversation is not a list", f"{name} is {type(value).__name__}")
    if not value:
        raise InvalidRow("empty conversation", f"{name} is []")
    if name == "data":
        roles = ("user", "assistant") * len(value)
        return [{"role": role, "content": turn} for role, turn in zip(roles, value, strict=False)]
    return value


def _turns_in_text(text: Any) -> list[Any]:
    if not isinstance(text, str):
        raise InvalidRow("content is not text", f"text is {type(text).__name__}")
    for markers in MARKERS:
        if markers.opening.search(text):
            return _between(markers, text)
    raise InvalidRow("text without turns", "no ChatML or Llama 3 markers in it; a plain question belongs into prompt")


def _between(markers: Markers, text: str) -> list[Any]:
    """The turns of a text that is nothing but turns; at most an opened response comes after them."""
    begin = markers.begin.match(text)
    place = begin.end() if begin else 0
    turns: list[Any] = []
    while not BLANK.fullmatch(text, place):
        opened = markers.opening.match(text, place)
        if opened is None:
            raise InvalidRow("text outside of the turns", f"after turn {len(turns)}: {text[place : place + SHOWN]!r}")
        end = text.find(markers.closing, opened.end())
        content = text[opened.end() : end if end >= 0 else None]
        if end < 0 and BLANK.fullmatch(content) and ROLES.get(opened[1]) == "assistant":
            break  # a prompt for a server ends so
        if end < 0 or markers.opening.search(content):
            raise InvalidRow(
                "a turn without its end", f"turn {len(turns) + 1} ({opened[1]}) has no {markers.closing}"
            )
        turns.append({"role": opened[1], "content": content})
        place = end + len(markers.closing)
    if not turns:
        raise InvalidRow("empty conversation", "text holds no turn")
    return turns


def _message(raw: Any, at: int) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRow("a message is not a JSON object", f"message {at} is {type(raw).__name__}")
    name, content = raw.get("role"), raw.get("content")
    if name is None:
        name, content = raw.get("from"), raw.get("value")
    role = ROLES.get(name) if isinstance(name, str) else None
    more = SPECIAL_FIELDS.intersection(raw)
    if (more and any(raw.get(field) for field in TOOL_FIELDS)) or (isinstance(name, str) and name in TOOL_ROLES):
        raise InvalidRow("tool calls", f"message {at} ({name}); no tool can be run here")
    if role is None:
        raise InvalidRow("unknown role", f"message {at}: {name!r}")
    if content is None:
        raise InvalidRow("no content", f"message {at} ({name}): null or missing")
    if not isinstance(content, str):
        raise InvalidRow("content is not text", f"message {at} ({name}): {type(content).__name__}")
    if not content or content.isspace():
        raise InvalidRow("no content", f"message {at} ({name}): only white space")
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
        raise InvalidRow("system message only")
    for at, message in enumerate(messages[start:], start):
        expected = "user" if (at - start) % 2 == 0 else "assistant"
        role = message["role"]
        if role == expected:
            continue
        if at == start:
            raise InvalidRow(f"{role} first", f"message {at}")
        if role == "system":
            raise InvalidRow("system message in the middle", f"message {at}")
        raise InvalidRow(f"two {role} turns in a row", f"messages {at - 1} and {at}")
