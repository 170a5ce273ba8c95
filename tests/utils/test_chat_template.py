"""Rendering with Qwen3's own chat template: prompts are what a server reads, responses what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specforge_dspine.utils.chat_template import (
    check_template,
    end_ids,
    prompt_ids,
    response_text,
    split_reasoning,
    unfinished_reasoning,
)
from specforge_dspine.utils.errors import InvalidRow
from tests.support.qwen3_tokenizer import qwen3_chat_tokenizer, qwen3_tokenizer
from tests.support.targets import build_qwen3

EMPTY_REASONING = "<think>\n\n</think>\n\n"
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
]


@pytest.fixture(scope="module")
def qwen() -> PreTrainedTokenizerFast:
    return qwen3_chat_tokenizer()


def test_thinking_off_puts_the_empty_block_into_the_prompt(qwen: PreTrainedTokenizerFast) -> None:
    # SpecForge#296, NeMo#3738: the template's own <think></think> was trained on.
    prompt = prompt_ids(qwen, CHAT[:1], enable_thinking=False)
    assert qwen.decode(prompt).endswith(f"<|im_start|>assistant\n{EMPTY_REASONING}")


def test_thinking_on_leaves_the_reasoning_to_the_target(qwen: PreTrainedTokenizerFast) -> None:
    prompt = prompt_ids(qwen, CHAT[:1], enable_thinking=True)
    assert qwen.decode(prompt).endswith("<|im_start|>assistant\n")
    assert prompt == prompt_ids(qwen, CHAT[:1], enable_thinking=None), "the template's default"


def test_one_rendering_of_a_whole_chat_is_not_what_the_server_saw(qwen: PreTrainedTokenizerFast) -> None:
    first = prompt_ids(qwen, CHAT[:1], enable_thinking=False)
    second = prompt_ids(qwen, CHAT, enable_thinking=False)
    # The template drops the empty block of the earlier answer, so no prefix of the second is the first.
    assert second[: len(first)] != first
    assert qwen.decode(second).count("<think>") == 1
    for messages, ids in ((CHAT[:1], first), (CHAT, second)):
        text = qwen.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        assert qwen(text, add_special_tokens=False).input_ids == ids


def test_responses_enter_the_history_as_a_client_sees_them(qwen: PreTrainedTokenizerFast) -> None:
    reasoned = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    response = response_text(qwen, [*qwen(reasoned).input_ids, qwen.eos_token_id])
    assert response == reasoned
    history = [CHAT[0], {"role": "assistant", "content": response}, CHAT[2]]
    rendered = qwen.decode(prompt_ids(qwen, history, enable_thinking=True))
    assert "It is 4.<|im_end|>" in rendered and "Two and two" not in rendered


ASSISTANT = "<|im_start|>user\n<think> about it<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "text", "unfinished"),
    [
        (ASSISTANT, "<think>\nHm", True),
        (ASSISTANT, "<think>\nHm\n</think>\n\nYes", False),
        (ASSISTANT, "Yes", False),
        (ASSISTANT, "", False),
        (f"{ASSISTANT}<think>\n", "Hm", True),
        (f"{ASSISTANT}<think>\n", "Hm\n</think>\n\nYes<|im_end|>", False),
        (f"{ASSISTANT}{EMPTY_REASONING}", "Yes", False),
    ],
)
def test_reasoning_cut_off_is_recognized(
    qwen: PreTrainedTokenizerFast, prompt: str, text: str, unfinished: bool
) -> None:
    # Thinking models' templates open <think> at the end of the prompt: then the response holds no opening.
    assert unfinished_reasoning(qwen, qwen(prompt).input_ids, qwen(text).input_ids) is unfinished


def test_a_template_that_refuses_is_told_in_its_words(qwen: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=qwen.backend_tokenizer)
    plain.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(InvalidRow, match=r"the template refuses these turns.*System role not supported"):
        prompt_ids(plain, CHAT[:1], enable_thinking=None)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("<think>\nHm\n</think>\n\nYes", ("Hm", "Yes")),
        ("Hm\n</think>\nYes", ("Hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", ("", "Yes")),
        ("Yes", ("", "Yes")),
    ],
)
def test_reasoning_is_split_as_the_template_does(content: str, parts: tuple[str, str]) -> None:
    assert split_reasoning(content) == parts


def test_prompts_end_with_the_user(qwen: PreTrainedTokenizerFast) -> None:
    for history in ([], CHAT[:2]):
        with pytest.raises(ValueError, match="must end with a user turn"):
            prompt_ids(qwen, history, enable_thinking=None)


def test_switches_that_a_template_would_ignore_are_refused(qwen: PreTrainedTokenizerFast) -> None:
    check_template(qwen, True)
    with pytest.raises(ValueError, match="no chat template"):
        check_template(qwen3_tokenizer(), None)
    plain = PreTrainedTokenizerFast(tokenizer_object=qwen.backend_tokenizer)
    plain.chat_template = "{% for part in messages %}{{ part.content }}{% endfor %}"
    check_template(plain, None)
    with pytest.raises(ValueError, match="thinking none"):
        check_template(plain, False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config.json": 7}, {7}),
        ({"config.json": [7, 9]}, {7, 9}),
        ({"generation_config.json": [8]}, {8}),
        ({"config.json": 7, "generation_config.json": [8, 9]}, {7, 8, 9}),
    ],
)
def test_what_ends_a_response_is_what_any_file_says(
    qwen: PreTrainedTokenizerFast, tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    target = build_qwen3(tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        path = target / name
        document = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(document | {"eos_token_id": files.get(name)}))
    assert end_ids(target, qwen) == expected | {qwen.eos_token_id}
