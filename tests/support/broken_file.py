"""A file of chats, whole and broken, and beside it what every row of it should come to.

The kinds of trouble are those that public data sets have. Whoever writes a row notes its line and the reason for
which it has to be dropped; no code of ours decides that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.readers.json_array import REST_INVALID

Dropped = tuple[int, str]


def user(text: Any) -> dict[str, Any]:
    return {"from": "human", "value": text}


def bot(text: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


INVALID: list[tuple[Any, str]] = [
    ({"conversations": []}, "empty conversation"),
    ({"messages": []}, "empty conversation"),
    ({"conversations": [bot("Hi"), user("Hello")]}, "assistant first"),
    ({"conversations": [user("a"), user("b")]}, "two user turns in a row"),
    ({"conversations": [user("a"), bot("b"), bot("c")]}, "two assistant turns in a row"),
    ({"conversations": [{"from": "system", "value": "Be kind."}]}, "system message only"),
    ({"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}, "assistant first"),
    ({"conversations": [user("a"), {"from": "system", "value": "x"}]}, "system message in the middle"),
    ({"conversations": [user(None)]}, "no content"),
    ({"messages": [{"role": "user"}]}, "no content"),
    ({"conversations": [user(" \n")]}, "no content"),
    ({"conversations": [user("a"), bot(None)]}, "no content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "content is not text"),
    ({"conversations": [user(7)]}, "content is not text"),
    ({"data": ["a", 7]}, "content is not text"),
    ({"instruction": "a", "input": 7}, "content is not text"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role"),
    ({"conversations": [{"value": "a"}]}, "unknown role"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, "tool calls"),
    ({"conversations": [user("a"), {"from": "function_call", "value": "f()"}]}, "tool calls"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "tool calls",
    ),
    ({"conversations": ["a"]}, "a message is not a JSON object"),
    ({"conversations": None}, "the conversation is not a list"),
    ({"conversations": {"from": "human"}}, "the conversation is not a list"),
    ({"text": "no markers"}, "text without turns"),
    ({"text": "<|im_start|>assistant\n"}, "empty conversation"),
    ({"text": "<|im_start|>user\nHi<|im_start|>assistant\nYo<|im_end|>\n"}, "a turn without its end"),
    ({"text": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo"}, "a turn without its end"),
    ({"text": "<|im_start|>user\n"}, "a turn without its end"),
    ({"text": "Before<|im_start|>user\nHi<|im_end|>"}, "text outside of the turns"),
    (
        {"text": "<|im_start|>user\nHi<|im_end|>between<|im_start|>assistant\nYo<|im_end|>"},
        "text outside of the turns",
    ),
    (
        {"text": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>after"},
        "text outside of the turns",
    ),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
    ({"tools": [{"name": "f"}], "conversations": [user("a")]}, "tool calls"),
    ({"system": 7, "conversations": [user("a")]}, "content is not text"),
    ({"system": "a", "messages": [{"role": "system", "content": "b"}, user("c")]}, "two system messages"),
    (
        {"answer": "a"},
        "none of the fields conversations, messages, data, prompt, question, problem, instruction, text",
    ),
    ([], "not a JSON object"),
    ("a", "not a JSON object"),
    (None, "not a JSON object"),
]
"""Entries that are no conversations, and the reason that is to be given."""

SHAPES: list[Callable[[str], Any]] = [
    lambda text: {"conversations": [user(text), bot("An answer.")]},
    lambda text: {"id": "same", "conversations": [user(text), bot("One."), user("And then?"), bot("Two.")]},
    lambda text: {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]},
    lambda text: {
        "prompt": text,
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x", "reasoning": "y"}],
    },
    lambda text: {"data": [text, "An answer.", "More, please.", "More."]},
    lambda text: {"prompt": text},
    lambda text: {"instruction": text, "input": ""},
    lambda text: {"instruction": "Translate.", "input": text, "output": "An answer."},
    lambda text: {"text": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nAn answer.<|im_end|>\n"},
    lambda text: {"messages": None, "conversations": [user(text)], "score": float("nan")},
    lambda text: {"system": "Be brief.", "tools": "[]", "conversations": [user(text), bot("An answer.")]},
    lambda text: {"system": " ", "prompt": text, "response": "An answer."},
]
"""Conversations in every shape that is read; their user turns differ if ``text`` does."""


@dataclass
class BrokenFile:
    """Lines under way, and what is expected of them."""

    lines: list[bytes] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def add(self, line: bytes, reason: str | None = None) -> None:
        self.lines.append(line)
        if reason is None:
            self.kept.append(len(self.lines))
        else:
            self.dropped.append((len(self.lines), reason))

    def blank(self) -> None:
        self.lines.append(b"  ")

    def write(self, path: Path) -> Path:
        """With a byte order mark and both kinds of line end; the last line is cut off."""
        self.add(b'{"conversations": [{"from": "human", "val', "not JSON")
        ends = [b"\r\n" if number % 3 == 0 else b"\n" for number in range(len(self.lines) - 1)] + [b""]
        path.write_bytes(b"\xef\xbb\xbf" + b"".join(map(bytes.__add__, self.lines, ends)))
        return path

    def write_array(self, path: Path) -> Path:
        """As the entries of a JSON array, one on a line, without the blank ones; the last entry is cut off.

        Nothing of it can be read, nor is there an end to the array.
        """
        lines = [line for line in self.lines if line.strip()]
        numbers = {old: new for new, old in enumerate((k for k, line in enumerate(self.lines, 1) if line.strip()), 2)}
        self.dropped = [(numbers[line], reason) for line, reason in self.dropped]
        self.dropped.append((len(lines) + 2, REST_INVALID))
        self.kept = [numbers[line] for line in self.kept]
        path.write_bytes(b"[\n" + b",\n".join([*lines, b'{"conversations": [{"from": "human", "val']))
        return path


def broken_file(rows: int, seed: int, *, as_array: bool = False) -> BrokenFile:
    """About ``rows`` lines, a third of them invalid; those of an array are JSON all the same."""
    draw = random.Random(seed)
    result = BrokenFile()
    earlier: list[bytes] = []
    for number in range(rows):
        kind = draw.random()
        if kind < 0.65:
            shape = draw.choice([shape for shape in SHAPES if not (as_array and "NaN" in json.dumps(shape("")))])
            line = json.dumps(shape(f"Question {number}, über {number} things?")).encode()
            earlier.append(line)
            result.add(line)
        elif kind < 0.75 and earlier:
            again = draw.choice(earlier)
            result.add(again.replace(b"Question", b"qUESTION") if draw.random() < 0.5 else again, "duplicate")
        elif kind < 0.92:
            entry, reason = draw.choice(INVALID)
            result.add(json.dumps(entry).encode(), reason)
        elif kind < 0.95:
            result.add(rb'{"prompt": "half \ud800 pair %d"}' % number, "not UTF-8")
        elif kind < 0.98 and not as_array:
            if draw.random() < 0.5:
                result.add(b'{"prompt": "bad \xff byte %d"}' % number, "not UTF-8")
            else:
                whole = json.dumps(draw.choice(SHAPES)("cut")).encode()
                result.add(whole[: draw.randrange(1, len(whole))], "not JSON")
        else:
            result.blank()
    return result
