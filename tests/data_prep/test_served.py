"""What training sees of a chat is what the server saw and wrote, for Qwen3's template and tokenizer and SmolLM2's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from transformers import AutoTokenizer

from data_prep import regenerate, tokenize
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import Sample, TargetIdentity, read_record
from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.utils.chat_template import response_text
from tests.support.chat_targets import build_chat_target
from tests.support.commands import succeed

NEW_TOKENS = 16
TURNS = ["What is 2 + 2?", "And 3 + 3? Ünïcode, please.", "<think> about it"]
THINKING = {"qwen3": ["on", "off"], "smollm2": ["none"]}
LAYERS = (0, 1)


@pytest.fixture(scope="module", params=sorted(THINKING))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, ManagedServer]]:
    """A target's name, its directory, and a server that also reads and writes text."""
    path = build_chat_target(request.param, tmp_path_factory.mktemp("chat") / request.param)
    server = ManagedServer(str(path), tmp_path_factory.mktemp("server"), LAYERS, dtype="float32")
    server.command.remove("--skip-tokenizer-init")
    with server:
        yield request.param, path, server


def chatted(url: str, history: list[dict[str, str]], thinking: str) -> tuple[int, str]:
    """What the server's own chat interface makes of ``history``: tokens of the prompt, and the response."""
    body = {
        "model": "default",
        "messages": history,
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "chat_template_kwargs": {} if thinking == "none" else {"enable_thinking": thinking == "on"},
    }
    with requests.Session() as session:
        session.trust_env = False
        answer = session.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]


@pytest.mark.server
def test_training_sees_what_the_server_saw_and_wrote(served: tuple[str, Path, ManagedServer], tmp_path: Path) -> None:
    name, path, server = served
    tokenizer = AutoTokenizer.from_pretrained(path)
    identity = TargetIdentity.from_config(str(path), LAYERS, "float32")
    prompts = tmp_path / "prompts.jsonl"
    chat = [TURNS[0], "the data set's response", TURNS[1], "another", TURNS[2]]
    prompts.write_text(json.dumps({"data": chat}) + "\n", encoding="utf-8")
    for thinking in THINKING[name]:
        responses, samples = tmp_path / f"{thinking}.responses.jsonl", tmp_path / f"{thinking}.samples.jsonl"
        common = ["--target", str(path), "--max-length", "512"]
        words = ["--input", str(prompts), "--output", str(responses), "--server", server.url, *common]
        succeed(regenerate.main, [*words, "--max-new-tokens", str(NEW_TOKENS), "--thinking", thinking])
        succeed(tokenize.main, ["--input", str(responses), "--output", str(samples), *common])
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        assert len(rows) == len(TURNS)
        history: list[dict[str, str]] = []
        for turn, row in zip(TURNS, rows, strict=True):
            history.append({"role": "user", "content": turn})
            length, ids = row["prompt_tokens"], row["input_ids"]
            text = response_text(tokenizer, ids[length:])
            seen, written = chatted(server.url, history, thinking)
            assert (seen, written) == (length, text), f"{name}, thinking {thinking}"
            assert row["loss_mask"] == [0] * length + [1] * (len(ids) - length)
            rendered = tokenizer.decode(ids[:length])
            assert rendered.endswith("<think>\n\n</think>\n\n") == (thinking == "off")
            with SGLangClient(server.url, timeout_s=60) as client:
                (captured,) = client.capture([Sample(f"t{length}", ids, row["loss_mask"])], identity)
            assert isinstance(captured, Path), captured
            assert read_record(captured)["input_ids"].tolist() == ids, "what the target's forward really saw"
            captured.unlink()
            history.append({"role": "assistant", "content": text})
