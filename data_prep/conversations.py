"""Reads foreign chat data and says of every entry what it is: a conversation, or why not.

Two shapes are understood, ShareGPT's ``{"conversations": [{"from", "value"}, ...]}`` and
``{"messages": [{"role", "content"}, ...]}``, besides single questions ``{"prompt" | "question" | "problem":
str}``. A conversation is an optional system message, then user and assistant in turn. Anything else is an
:class:`OddConversation`, to be counted and reported, neither repaired nor passed on.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.chat import Message

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
LISTS = ("conversations", "messages")
QUESTIONS = ("prompt", "question", "problem")


class OddConversation(ValueError):
    """An entry that is not a conversation.

    Attributes:
        reason: the kind of oddity, the same words for each of its kind.
        detail: where in the entry, and the value.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def read_messages(entry: Any, max_turns: int) -> list[Message]:
    """The messages of one entry up to its last user turn, at most ``max_turns`` user turns.

    Raises:
        OddConversation: for anything that is not a conversation (the module says what is one).
    """
    if not isinstance(entry, dict):
        raise OddConversation("not a JSON object", type(entry).__name__)
    for name in LISTS:
        if name in entry:
            return _cut([_message(raw, at) for at, raw in enumerate(_list(entry[name], name))], max_turns)
    for name in QUESTIONS:
        if name in entry:
            return _cut([_message({"role": "user", "content": entry[name]}, 0)], max_turns)
    raise OddConversation(f"none of the fields {', '.join(LISTS + QUESTIONS)}", f"has {sorted(entry)}")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise OddConversation("the conversation is not a list", f"{name} is {type(value).__name__}")
    if not value:
        raise OddConversation("empty conversation", f"{name} is []")
    return value


def _message(raw: Any, at: int) -> Message:
    if not isinstance(raw, dict):
        raise OddConversation("a message is not a JSON object", f"message {at} is {type(raw).__name__}")
    keys = ("role", "content") if "role" in raw else ("from", "value")
    role, content = (raw.get(key) for key in keys)
    if not isinstance(role, str) or role not in ROLES:
        raise OddConversation("unknown role", f"message {at}: {role!r}")
    if content is None:
        raise OddConversation("no content", f"message {at} ({role}): null or missing")
    if not isinstance(content, str):
        raise OddConversation("content is not text", f"message {at} ({role}): {type(content).__name__}")
    if not content.strip():
        raise OddConversation("no content", f"message {at} ({role}): only white space")
    return {"role": ROLES[role], "content": content}


def _cut(messages: list[Message], max_turns: int) -> list[Message]:
    start = 1 if messages[0]["role"] == "system" else 0
    if len(messages) == start:
        raise OddConversation("system message only")
    for at, message in enumerate(messages[start:], start):
        expected = "user" if (at - start) % 2 == 0 else "assistant"
        role = message["role"]
        if role == expected:
            continue
        if at == start:
            raise OddConversation(f"{role} first", f"message {at}")
        if role == "system":
            raise OddConversation("system message in the middle", f"message {at}")
        raise OddConversation(f"two {role} turns in a row", f"messages {at - 1} and {at}")
    end = start + 2 * max_turns - 1
    kept = messages[:end]
    return kept if kept[-1]["role"] == "user" else kept[:-1]


def file_entries(path: Path) -> Iterator[tuple[int, Any]]:
    """Entries of a ``.jsonl`` or ``.jsonl.gz`` file or of the array in a ``.json`` file, with their first lines.

    A line of a ``.jsonl`` file that is not JSON comes as an :class:`OddConversation` in place of the entry.

    Raises:
        ValueError: another kind of file, or an array that is broken (nothing after the break can be read).
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _lines(path)
    elif path.suffix == ".json":
        yield from _array(path)
    else:
        raise ValueError(
            f"{path}: use a .jsonl or .jsonl.gz file (an entry per line) or a .json file (an array of entries)"
        )


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                yield number, OddConversation("not JSON", str(error))


def _array(path: Path) -> Iterator[tuple[int, Any]]:
    text = path.read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    number, counted = 1, 0
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError(f"{path} is not a JSON array; if it has an entry per line, call it .jsonl")
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        number, counted = number + text.count("\n", counted, at), at
        try:
            entry, at = decoder.raw_decode(text, at)
            at = _skip(text, at)
            separator = text[at : at + 1]
            if separator not in (",", "]"):
                raise ValueError(f"',' or ']' expected after an entry, found {separator!r}")
        except ValueError as error:
            raise ValueError(f"{path}, entry on line {number}: the array is broken ({error})") from error
        yield number, entry
        if separator == "]":
            return
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
