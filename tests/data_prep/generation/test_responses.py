"""Regeneration without SGLang: templates that refuse, open reasoning, servers that fail for a while."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from data_prep.generation import server_pool as servers_module
from data_prep.generation.responses import (
    Conversation,
    Conversations,
    GenerationSettings,
    ResponseGenerator,
    TurnResult,
)
from data_prep.generation.server_pool import ATTEMPTS, Requirements, ServerPool, ServersLostError
from data_prep.readers.inputs import open_inputs
from specforge_dspine.streaming.client import Completion
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.ledger import Ledger
from tests.support.chat_targets import SMOLLM2, smollm2_tokenizer

SYSTEM_REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Script:
    """Gives texts one after the other, as ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *texts: str) -> None:
        self.prompts: list[str] = []
        self._tokenizer = tokenizer
        self._texts = iter(texts)

    def generate(self, prompt: list[int], **options: Any) -> Completion:
        self.prompts.append(self._tokenizer.decode(prompt))
        text = next(self._texts)
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        return Completion(list(ids), "stop" if text.endswith("<|im_end|>") else "length")


def generated(template: str, messages: list[dict[str, str]], *texts: str) -> tuple[list[TurnResult], Script]:
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template = template
    source = Script(tokenizer, *texts)
    generator = ResponseGenerator(tokenizer, GenerationSettings(max_length=2000, dtype="float32"), "t", source)
    found = list(generator.responses(Conversation(0, "n", "s", "f", 1, messages)))
    return [each for part in found for each in part], source


def test_a_template_that_refuses_a_system_message_costs_the_turn() -> None:
    chat = [said("system", "S"), said("user", "a"), said("assistant", "x"), said("user", "b")]
    first, second = generated(SYSTEM_REFUSED + SMOLLM2, chat, "never asked")[0]
    assert (first.outcome.reason, first.outcome.detail) == ("the template refuses these turns", "No system role")
    assert second.outcome.reason == "an earlier turn has no response"
    assert all(
        isinstance(each.outcome, dict)
        for each in generated(SYSTEM_REFUSED + SMOLLM2, chat[1:], "one<|im_end|>", "two<|im_end|>")[0]
    )


def test_reasoning_that_the_prompt_opened_and_the_limit_cut_is_no_response() -> None:
    opening = SMOLLM2.replace(
        "'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    assert opening != SMOLLM2
    chat = [said("user", "a"), said("assistant", "x"), said("user", "b")]
    (first, second), source = generated(opening, chat, "I am still thinking about")
    assert isinstance(first.outcome, dict)
    assert second.outcome.reason == "the earlier response was cut off while thinking"
    assert len(source.prompts) == 1
    (first, second), source = generated(opening, chat, "hm</think>yes<|im_end|>", "no</think>no<|im_end|>")
    assert isinstance(second.outcome, dict) and "hm</think>yes" in source.prompts[1]


def test_an_error_in_rendering_costs_the_turn_and_a_lost_server_ends_the_job() -> None:
    chat = [said("user", "a")]
    (result,) = generated("{{ 1 // 0 }}", chat, "never asked")[0]
    assert result.outcome.reason == "unexpected ZeroDivisionError"

    class Lost:
        def generate(self, prompt: list[int], **options: Any) -> Completion:
            raise ServersLostError("gone")

    generator = ResponseGenerator(
        smollm2_tokenizer(), GenerationSettings(max_length=2000, dtype="float32"), "t", Lost()
    )
    with pytest.raises(ServersLostError):
        list(generator.responses(Conversation(0, "n", "s", "f", 1, chat)))


def test_rows_without_ids_are_not_told_that_their_ids_must_differ(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"id": "x", "prompt": "b"}, {"id": "x", "prompt": "c"}]
    chats = tmp_path / "a.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Ledger([tmp_path / "out.jsonl"], "regenerate", {}) as ledger:
        missing = list(Conversations(open_inputs([str(chats)]), ledger, None).unanswered(tqdm(disable=True)))
        lost = [json.loads(line) for (line,) in ledger.db.execute("SELECT line FROM dropped ORDER BY place")]
    assert [asked.messages[0]["content"] for asked in missing] == ["a", "b"]
    assert [(row["line"], row["reason"]) for row in lost] == [(2, "duplicate"), (4, "duplicate id")]
    assert "ids" not in lost[0]["detail"] and "ids must differ" in lost[1]["detail"]


class Flaky(ThreadingHTTPServer):
    """Says that it serves "m"; each request takes ``slow_s``, and the first ``failures`` of them fail."""

    daemon_threads = True
    slow_s, failures = 0.0, 0


class Handler(BaseHTTPRequestHandler):
    server: Flaky

    def do_GET(self) -> None:
        self._say(200, {"model_path": "m", "dtype": "float32"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.slow_s)
        self.server.failures -= 1
        if self.server.failures >= 0:
            self._say(500, {})
        else:
            self._say(200, [{"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}}}])

    def _say(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def flaky() -> Iterator[Flaky]:
    with Flaky(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asking(flaky: Flaky, patience_s: float) -> ServerPool:
    return ServerPool([f"http://127.0.0.1:{flaky.server_port}"], Requirements("m", "float32"), 30, patience_s)


def test_patience_counts_from_the_failure_not_from_the_last_response(
    flaky: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "FIRST_REST_S", 0.05)
    flaky.slow_s, flaky.failures = 0.6, 1
    assert asking(flaky, patience_s=0.5).generate([1], max_new_tokens=2).output_ids == [1, 2]


def test_lost_servers_end_the_wait_after_the_patience(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "FIRST_REST_S", 0.05)
    both = asking(flaky, patience_s=0.5)
    assert both.generate([1], max_new_tokens=2)
    flaky.shutdown()
    flaky.server_close()
    with pytest.raises(ServersLostError, match="no server has answered for"):
        both.generate([1], max_new_tokens=2)


def test_a_server_that_runs_but_answers_nothing_ends_the_job(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST_REST_S", 0.01), ("MAX_FAILED_REQUESTS", 2)):
        monkeypatch.setattr(servers_module, name, value)
    failing = asking(flaky, patience_s=60)
    flaky.failures = ATTEMPTS
    with pytest.raises(InvalidRow, match="the server fails on it"):
        failing.generate([1], max_new_tokens=2)
    assert failing.generate([1], max_new_tokens=2), "an answer in between: the next failure is the first again"
    flaky.failures = 10 * ATTEMPTS
    with pytest.raises(InvalidRow, match="the server fails on it"):
        failing.generate([1], max_new_tokens=2)
    with pytest.raises(ServersLostError, match=r"failed on 2 requests in a row.*the same command continues"):
        failing.generate([1], max_new_tokens=2)
