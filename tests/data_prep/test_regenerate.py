"""Regeneration against a real SGLang server: exact ids, own history, kill and continue, lost and wrong servers."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep import regenerate, tokenize
from data_prep.generation.responses import GenerationSettings, ResponseGenerator
from data_prep.generation.server_pool import Requirements, ServerPool, WrongServerError
from data_prep.regenerate import job_inputs
from specforge_dspine.streaming.client import Completion
from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.utils.chat_template import prompt_ids, response_text
from specforge_dspine.utils.ledger import Ledger
from tests.conftest import wait_for
from tests.support import ROOT
from tests.support.commands import refuse, succeed
from tests.support.small import save_tokenizer
from tests.support.targets import EOS, build_qwen3

TEMPLATE = (  # w3 opens a turn of the user, w4 one of the assistant, w5 closes it
    "{% for part in messages %}{{ 'w3 ' if part.role == 'user' else 'w4 ' }}{{ part.content }} w5 {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)
NEW_TOKENS = 24
MAX_LENGTH = 400
CONTEXT = 512  # of the tiny target


def save_target(path: Path) -> Path:
    """A tiny target with a chat tokenizer, whose responses end by themselves now and then."""
    save_tokenizer(build_qwen3(path))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 1.5
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def url(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ManagedServer(str(target), tmp_path_factory.mktemp("server"), [0], dtype="float32") as server:
        yield server.url


def chat(name: str, *turns: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {"id": name, "source": "test", "messages": messages}


def words(seed: int, count: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{k}" for k in torch.randint(6, 250, (count,), generator=generator).tolist())


def write(path: Path, conversations: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return path


def arguments(target: Path, prompts: Path, out: Path, *further: str) -> list[str]:
    return [
        *("--target", str(target), "--input", str(prompts), "--output", str(out)),
        *("--max-new-tokens", str(NEW_TOKENS), "--max-length", str(MAX_LENGTH), "--in-flight", "3", *further),
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dropped(out: Path) -> list[tuple[Any, ...]]:
    return [(row["line"], row.get("turn"), row["reason"]) for row in read(Path(f"{out}.dropped.jsonl"))]


def summary(out: Path) -> dict[str, Any]:
    return json.loads(Path(f"{out}.summary.json").read_text())


TOO_SHORT = "fewer than 2 generated tokens"


@pytest.mark.server
def test_records_and_samples_hold_exactly_what_was_sent_and_generated(target: Path, url: str, tmp_path: Path) -> None:
    chats = [chat(f"one-{k}", words(k, 5 + k)) for k in range(8)]
    chats.insert(3, chat("three", words(50, 6), "the data set's own response", words(51, 4), "another", words(52, 9)))
    out = tmp_path / "out.jsonl"
    succeed(regenerate.main, arguments(target, write(tmp_path / "prompts.jsonl", chats), out, "--server", url))
    records = read(out)
    skipped = {(row["id"], row["turn"]) for row in read(Path(f"{out}.dropped.jsonl"))}
    assert {reason for _, _, reason in dropped(out)} <= {TOO_SHORT}
    order = [(row["id"], turn) for row in chats for turn in range((len(row["messages"]) + 1) // 2)]
    assert [(record["conversation"], record["turn"]) for record in records] == [k for k in order if k not in skipped]
    assert len(skipped) < 3 and ("three", 2) not in skipped
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    history: list[dict[str, str]] = []
    for record in records:
        row = next(row for row in chats if row["id"] == record["conversation"])
        history = [*(history if record["turn"] else []), row["messages"][2 * record["turn"]]]
        prompt, generated = record["prompt_ids"], record["output_ids"]
        assert prompt == prompt_ids(tokenizer, history, enable_thinking=None)
        # The end token that the target emitted is part of the response, and of what a draft has to predict.
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )
        assert expected[0].tolist() == prompt + generated
        assert (generated[-1] == EOS) == (record["finish"] == "stop") or len(generated) == NEW_TOKENS
        history.append({"role": "assistant", "content": response_text(tokenizer, generated)})
    assert {record["finish"] for record in records} == {"stop", "length"}
    facts = summary(out)
    assert facts["rows_kept"] == len(records) and facts["rows_in"] == len(order)
    assert facts["generated_tokens"] == sum(len(record["output_ids"]) for record in records)
    assert facts["cut_by_the_limit"] == sum(record["finish"] == "length" for record in records) > 0
    # What training sees is what the server read and wrote.
    samples = tmp_path / "samples.jsonl"
    succeed(tokenize.main, ["--input", str(out), "--output", str(samples), "--target", str(target)])
    for record, sample in zip(records, read(samples), strict=True):
        assert sample["input_ids"] == record["prompt_ids"] + record["output_ids"]
        assert sample["loss_mask"] == [0] * len(record["prompt_ids"]) + [1] * len(record["output_ids"])
        assert (sample["input_ids"][-1] == EOS) == (record["output_ids"][-1] == EOS)


@pytest.mark.server
def test_what_cannot_be_used_is_counted_with_its_reason(target: Path, url: str, tmp_path: Path) -> None:
    chats = [
        chat("good", words(1, 5)),
        chat("long", words(2, MAX_LENGTH), "x", words(3, 4)),
        {"messages": []},
        chat("refused", words(4, CONTEXT + 50)),
        chat("good", words(6, 5)),
        {"messages": chat("", words(5, 5))["messages"]},
    ]
    prompts = write(tmp_path / "prompts.jsonl", chats)
    with prompts.open("a") as file:
        file.write('{"messages": [')
    out = tmp_path / "out.jsonl"
    succeed(regenerate.main, arguments(target, prompts, out, "--server", url))
    too_long = "prompt and new tokens exceed the maximum length"
    others = [
        (2, 1, "an earlier turn has no response"),
        (3, None, "empty conversation"),
        (4, 0, too_long),
        (5, None, "duplicate id"),
        (7, None, "not JSON"),
    ]
    assert dropped(out) == [(2, 0, too_long), *others]
    assert (summary(out)["rows_in"], summary(out)["rows_kept"]) == (8, 2)
    # With a limit beyond the server's context the server is asked, refuses one, and answers the others.
    succeed(
        regenerate.main, [*arguments(target, prompts, out, "--server", url, "--overwrite"), "--max-length", "2000"]
    )
    assert dropped(out) == [(3, None, "empty conversation"), (4, 0, "refused by the server"), *others[3:]]
    assert [record["conversation"] for record in read(out)][:3] == ["good", "long", "long"]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "data_prep.regenerate", *command], cwd=ROOT)


def has_responses(out: Path) -> bool:
    """Whether the ledger, which is locked, has grown beyond what it is without any, and its journal is done with."""
    partial, journal = Path(f"{out}.partial"), Path(f"{out}.partial-journal")
    has_grown = partial.exists() and partial.stat().st_size > 6 << 14  # pages of empty tables and their indexes
    # A journal with a header belongs to a commit in progress, which a kill takes back.
    return has_grown and not (journal.exists() and any(journal.read_bytes()[:28]))


def committed(out: Path) -> int:
    """Responses that are in the ledger already, as another process sees it after a kill."""
    partial = Path(f"{out}.partial")
    with sqlite3.connect(partial) as db:
        return db.execute("SELECT COUNT(*) FROM kept").fetchone()[0]


@pytest.mark.server
def test_killed_and_continued_gives_the_same_file_and_asks_nothing_twice(
    target: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [chat(f"c{k}", words(k, 4 + k % 7), "x", words(100 + k, 5)) for k in range(80)]
    prompts = write(tmp_path / "prompts.jsonl", chats)
    undisturbed, killed = tmp_path / "a" / "out.jsonl", tmp_path / "b" / "out.jsonl"
    succeed(regenerate.main, arguments(target, prompts, undisturbed, "--server", url))
    process = start(arguments(target, prompts, killed, "--server", url))
    try:
        wait_for(lambda: has_responses(killed), 120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not killed.exists()
    before = committed(killed)
    assert 0 < before < 160, "killed in the middle"
    asked: list[str] = []
    generate = ResponseGenerator._generate

    def counted(self: ResponseGenerator, name: str, ids: list[int]) -> Completion:
        asked.append(name)
        return generate(self, name, ids)

    monkeypatch.setattr(ResponseGenerator, "_generate", counted)
    succeed(regenerate.main, arguments(target, prompts, killed, "--server", url))
    assert killed.read_bytes() == undisturbed.read_bytes()
    assert dropped(killed) == dropped(undisturbed)
    assert len(asked) == len(set(asked)) <= 160 - before
    capsys.readouterr()
    written = killed.stat().st_mtime_ns
    succeed(regenerate.main, arguments(target, prompts, killed, "--server", url))
    assert "is there already" in capsys.readouterr().out and killed.stat().st_mtime_ns == written
    changed = arguments(target, prompts, killed, "--server", url, "--temperature", "0.5")
    refuse(regenerate.main, changed, r"temperature was 0\.0 and is now 0\.5")


@pytest.mark.server
def test_a_server_dying_in_the_middle_is_replaced_by_the_other_or_told(
    target: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [chat(f"c{k}", words(k, 4 + k % 7), "x", words(100 + k, 5)) for k in range(60)]
    prompts = write(tmp_path / "prompts.jsonl", chats)
    expected = tmp_path / "expected.jsonl"
    succeed(regenerate.main, arguments(target, prompts, expected, "--server", url))
    two, alone = tmp_path / "two.jsonl", tmp_path / "alone.jsonl"

    def kill_under_way(dying: ManagedServer, out: Path, *urls: str) -> tuple[int, str]:
        command = arguments(target, prompts, out, "--server", *urls, "--patience", "3", "--dtype", "float32")
        full = [sys.executable, "-m", "data_prep.regenerate", *command]
        process = subprocess.Popen(full, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            wait_for(lambda: has_responses(out), 120)
            dying.stop()
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
            process.wait()
        return process.returncode, errors

    with ManagedServer(str(target), tmp_path / "server", [0], dtype="float32") as dying:
        status, _ = kill_under_way(dying, two, dying.url, url)
        assert status == 0 and two.read_bytes() == expected.read_bytes()
        dying.start()
        status, errors = kill_under_way(dying, alone, dying.url)
        assert status == 1 and "no server has answered for 3 s" in errors and "the same command continues" in errors
        assert "Traceback" not in errors and not alone.exists()
    succeed(regenerate.main, arguments(target, prompts, alone, "--server", url, "--dtype", "float32"))
    assert alone.read_bytes() == expected.read_bytes()


@pytest.mark.server
def test_managed_and_several_servers_give_the_same_and_end(target: Path, url: str, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat(f"c{k}", words(k, 5)) for k in range(4)])
    files = []
    ways = {"a": ["--server", url], "b": ["--managed", "cpu", "--dtype", "float32"], "c": ["--server", url, url]}
    for name, further in ways.items():
        files.append(tmp_path / f"{name}.jsonl")
        succeed(regenerate.main, arguments(target, prompts, files[-1], *further))
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    log = tmp_path / "b.jsonl.server"
    assert sorted(path.name for path in log.iterdir()) == ["server.log"]
    mine = [child for child in psutil.Process().children(recursive=True) if str(target) in " ".join(child.cmdline())]
    assert len([child for child in mine if "guard" in " ".join(child.cmdline())]) == 1, "the fixture's alone"


@pytest.mark.server
def test_another_target_than_the_served_one_is_refused(target: Path, url: str, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat("c", words(0, 5))])
    other = save_target(tmp_path / "other")
    out = tmp_path / "out.jsonl"
    command = arguments(other, prompts, out, "--server", url)
    refuse(regenerate.main, command, rf"serves {target}, not {other}.*--served-as")
    for dtype, problem in (("bfloat16", "computes in float32, not in bfloat16"), ("float32", f"not {other}")):
        asked = target if dtype == "bfloat16" else other
        command = arguments(asked, prompts, out, "--server", url, "--dtype", dtype, "--overwrite")
        refuse(regenerate.main, command, problem)
    command = arguments(target, prompts, out, "--server", url, "--overwrite", "--seed", "1", "--temperature", "1")
    refuse(regenerate.main, command, "ignores seeds: start it with --enable-deterministic-inference")
    assert not out.exists()
    # A server that was replaced by another target's while it rested.
    servers = ServerPool([url], Requirements(str(other), "float32"), timeout_s=60, patience_s=60)
    servers._servers[0].failures = 1
    with pytest.raises(WrongServerError, match="serves"):
        servers.generate([5, 6], max_new_tokens=2)


@pytest.mark.server
def test_sampled_responses_differ_and_carry_their_seed(target: Path, url: str, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat(f"c{k}", words(1, 5)) for k in range(6)])
    out = tmp_path / "out.jsonl"
    succeed(regenerate.main, arguments(target, prompts, out, "--server", url, "--temperature", "1"))
    assert len({tuple(record["output_ids"]) for record in read(out)}) > 1
    sent: list[dict[str, Any]] = []

    class Server:
        def generate(self, prompt: list[int], **options: Any) -> Completion:
            sent.append(options)
            return Completion([7, 8], "length")

    settings = GenerationSettings(max_length=64, dtype="float32", max_new_tokens=8, temperature=1.0, seed=3)
    generator = ResponseGenerator(AutoTokenizer.from_pretrained(target), settings, "t", Server())
    for name in ("a.0", "a.1", "a.0"):
        generator._generate(name, [5])
    assert sent[0]["seed"] == sent[2]["seed"] != sent[1]["seed"]


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        (["--server", "http://127.0.0.1:9"], "does not answer"),
        (["--managed", "cpu", "--thinking", "off"], "no such switch"),
        (["--managed", "cpu", "--max-length", "20"], "--max-length 20: leaves no room"),
        (
            ["--managed", "cpu", "--max-new-tokens", "1"],
            "--max-new-tokens 1: input should be greater than or",
        ),
        (["--managed", "cpu", "--seed", "1"], "greedy responses"),
        (["--managed", "cpu", "--served-as", "x"], "--served-as is for --server"),
        (["--managed", "cpu", "--seed", "1", "--temperature", "1"], "SGLang heeds seeds on GPUs only"),
    ],
)
def test_bad_requests_end_before_a_server_starts(
    target: Path, tmp_path: Path, further: list[str], problem: str
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat("c", words(0, 5))])
    refuse(regenerate.main, [*arguments(target, prompts, tmp_path / "out.jsonl"), *further], problem)
    assert not (tmp_path / "out.jsonl.server").exists()


def test_nothing_to_ask_needs_no_server(target: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [{"messages": []}, 5])
    command = arguments(target, prompts, tmp_path / "out.jsonl", "--managed", "cpu")
    refuse(regenerate.main, command, "not one response to 2 turns: 1 × empty conversation; 1 × not a JSON object")


def test_the_key_covers_every_input(target: Path, tmp_path: Path) -> None:
    # Soup#1067: another template, tokenizer, length or model are another job.
    copy = save_target(tmp_path / "copy")

    def inputs(folder: Path = copy, **changed: Any) -> dict[str, Any]:
        settings = {"max_length": 64, "dtype": "float32", "max_new_tokens": 8} | changed
        return job_inputs(folder, AutoTokenizer.from_pretrained(folder), GenerationSettings(**settings))

    def differing(then: dict[str, Any], now: dict[str, Any]) -> set[str]:
        return {name for name in then if then[name] != now[name]}

    first = inputs()
    assert inputs() == first and inputs(target) == first, "the same content elsewhere is the same"
    for name, value in (
        ("max_length", 65),
        ("dtype", "bfloat16"),
        ("max_new_tokens", 9),
        ("temperature", 0.5),
        ("thinking", "off"),
    ):
        assert differing(first, inputs(**{name: value})) == {name}
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = TEMPLATE.replace("w5", "w6")
    tokenizer.save_pretrained(copy)
    assert differing(first, third := inputs()) == {"chat_template"}
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(copy)
    assert "tokenizer" in differing(third, fourth := inputs())
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert differing(fourth, inputs()) == {"target"}


def test_a_dead_server_costs_no_finished_responses(target: Path, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "prompts.jsonl", [chat("c", words(0, 5))]), tmp_path / "out.jsonl"
    with Ledger([out], "regenerate", {"other": 1}) as ledger:
        ledger.keep(b"{}\n")
        ledger.finish(1, {})
    dead = ("--server", "http://127.0.0.1:9", "--dtype", "float32", "--overwrite")
    refuse(regenerate.main, arguments(target, prompts, out, *dead), "does not answer")
    assert out.read_bytes() == b"{}\n" and Path(f"{out}.summary.json").exists()
