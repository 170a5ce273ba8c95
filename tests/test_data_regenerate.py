"""Regeneration against a real SGLang server: exact ids, own history, skips with reasons, kill and continue."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import wait_for
from small import save_tokenizer
from targets import EOS, build_qwen3
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep import regenerate
from data_prep.answers import Settings, job_inputs
from data_prep.chat import answer_text, prompt_ids
from specforge_dspine.stream.server import ManagedServer

TEMPLATE = (  # w3 opens a turn of the user, w4 one of the assistant, w5 closes it
    "{% for part in messages %}{{ 'w3 ' if part.role == 'user' else 'w4 ' }}{{ part.content }} w5 {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)
NEW_TOKENS = 24
MAX_LENGTH = 400
CONTEXT = 512  # of the tiny target


def save_target(path: Path) -> Path:
    """A tiny target with a chat tokenizer, whose answers end by themselves now and then."""
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


def write(path: Path, conversations: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return path


def arguments(target: Path, prompts: Path, out: Path, *further: str) -> list[str]:
    return [
        *("--target", str(target), "--prompts", str(prompts), "--out", str(out)),
        *("--max-new-tokens", str(NEW_TOKENS), "--max-length", str(MAX_LENGTH), "--batch", "3", *further),
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs(sample: dict[str, Any]) -> list[int]:
    return sample["input_ids"][sample["prompt_tokens"] :]


@pytest.mark.server
def test_samples_hold_exactly_what_was_sent_and_generated(target: Path, url: str, tmp_path: Path) -> None:
    chats = [chat(f"one-{k}", words(k, 5 + k)) for k in range(8)]
    chats.insert(3, chat("three", words(50, 6), "the data set's own answer", words(51, 4), "another", words(52, 9)))
    prompts = write(tmp_path / "prompts.jsonl", chats)
    regenerate.main(arguments(target, prompts, tmp_path / "out.jsonl", "--server", url))
    samples = read(tmp_path / "out.jsonl")
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert all(row["skipped"] == "fewer than 2 generated tokens" for row in meta["skipped"])
    skipped = {(row["conversation"], row["turn"]) for row in meta["skipped"]}
    order = [(row["id"], turn) for row in chats for turn in range((len(row["messages"]) + 1) // 2)]
    assert [(sample["conversation"], sample["turn"]) for sample in samples] == [k for k in order if k not in skipped]
    assert len(skipped) < 3 and ("three", 2) not in skipped
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    history: list[dict[str, str]] = []
    for sample in samples:
        row = next(row for row in chats if row["id"] == sample["conversation"])
        history = [*(history if sample["turn"] else []), row["messages"][2 * sample["turn"]]]
        prompt = prompt_ids(tokenizer, history, enable_thinking=None)
        generated = outputs(sample)
        assert sample["input_ids"][: sample["prompt_tokens"]] == prompt
        assert sample["loss_mask"] == [0] * len(prompt) + [1] * len(generated)
        # The end token that the target emitted is part of the answer, and of what a draft has to predict.
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )
        assert expected[0].tolist() == sample["input_ids"]
        assert (generated[-1] == EOS) == (sample["finish"] == "stop") or len(generated) == NEW_TOKENS
        history.append({"role": "assistant", "content": answer_text(tokenizer, generated)})
    assert {sample["finish"] for sample in samples} == {"stop", "length"}
    assert meta["samples"] == len(samples)
    assert meta["generated_tokens"] == sum(map(len, map(outputs, samples)))


@pytest.mark.server
def test_what_cannot_be_used_is_counted_with_its_reason(
    target: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [
        chat("good", words(1, 5)),
        chat("long", words(2, MAX_LENGTH), "x", words(3, 4)),
        chat("refused", words(4, CONTEXT + 50)),
        chat("also-good", words(5, 5)),
    ]
    prompts = write(tmp_path / "prompts.jsonl", chats)
    out = tmp_path / "out.jsonl"
    regenerate.main(arguments(target, prompts, out, "--server", url))
    skipped = json.loads((tmp_path / "out.jsonl.meta.json").read_text())["skipped"]
    too_long = "prompt and new tokens exceed the maximum length"
    assert [(row["conversation"], row["turn"], row["skipped"]) for row in skipped] == [
        ("long", 0, too_long),
        ("long", 1, "an earlier turn was skipped"),
        ("refused", 0, too_long),
    ]
    assert f"skipped 2 turns: {too_long}" in capsys.readouterr().err
    # With a limit beyond the server's context the server is asked, refuses one, and answers the others.
    regenerate.main([*arguments(target, prompts, out, "--server", url, "--overwrite"), "--max-length", "2000"])
    (refused,) = json.loads((tmp_path / "out.jsonl.meta.json").read_text())["skipped"]
    assert refused["conversation"] == "refused" and "refused by the server" in refused["skipped"]
    assert [sample["conversation"] for sample in read(out)] == ["good", "long", "long", "also-good"]


@pytest.mark.server
def test_killed_and_continued_gives_the_same_file(
    target: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [chat(f"c{k}", words(k, 4 + k % 7), "x", words(100 + k, 5)) for k in range(80)]
    prompts = write(tmp_path / "prompts.jsonl", chats)
    undisturbed, killed = tmp_path / "a" / "out.jsonl", tmp_path / "b" / "out.jsonl"
    regenerate.main(arguments(target, prompts, undisturbed, "--server", url))
    command = [sys.executable, "-m", "data_prep.regenerate", *arguments(target, prompts, killed, "--server", url)]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
    partial = killed.with_name("out.jsonl.partial")
    try:
        wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 3, 120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not killed.exists() and partial.exists(), "killed in the middle"
    kept = partial.read_bytes().count(b"\n")
    partial.write_bytes(partial.read_bytes()[:-7])  # as if the kill had hit a write
    before = partial.read_bytes()
    regenerate.main(arguments(target, prompts, killed, "--server", url))
    assert killed.read_bytes() == undisturbed.read_bytes()
    assert not partial.exists() and kept >= 3 and before.count(b"\n") == kept - 1
    capsys.readouterr()
    written = killed.stat().st_mtime_ns
    regenerate.main(arguments(target, prompts, killed, "--server", url))
    assert "is there already" in capsys.readouterr().out and killed.stat().st_mtime_ns == written
    with pytest.raises(SystemExit, match=r"temperature was 0\.0 and is now 0\.5"):
        regenerate.main(arguments(target, prompts, killed, "--server", url, "--temperature", "0.5"))


@pytest.mark.server
def test_managed_and_several_servers_give_the_same_and_end(target: Path, url: str, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat(f"c{k}", words(k, 5)) for k in range(4)])
    files = []
    ways = {"a": ["--server", url], "b": ["--managed", "cpu", "--dtype", "float32"], "c": ["--server", url, url]}
    for name, further in ways.items():
        files.append(tmp_path / f"{name}.jsonl")
        regenerate.main(arguments(target, prompts, files[-1], *further))
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    log = tmp_path / "b.jsonl.server"
    assert sorted(path.name for path in log.iterdir()) == ["server.log"]
    mine = [child for child in psutil.Process().children(recursive=True) if str(target) in " ".join(child.cmdline())]
    assert len([child for child in mine if "guard" in " ".join(child.cmdline())]) == 1, "the fixture's alone"


@pytest.mark.server
def test_another_target_than_the_served_one_is_refused(target: Path, url: str, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat("c", words(0, 5))])
    other = save_target(tmp_path / "other")
    with pytest.raises(SystemExit, match=rf"serves {target}, not --target {other}"):
        regenerate.main(arguments(other, prompts, tmp_path / "out.jsonl", "--server", url))
    with pytest.raises(SystemExit, match="computes in float32, not in bfloat16"):
        regenerate.main(arguments(target, prompts, tmp_path / "out.jsonl", "--server", url, "--dtype", "bfloat16"))
    assert not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        (["--server", "http://127.0.0.1:9"], "does not answer"),
        (["--managed", "cpu", "--thinking", "off"], "no such switch"),
        (["--managed", "cpu", "--max-length", "20"], "max_length = 20 leaves no room"),
        (["--managed", "cpu", "--max-new-tokens", "1"], "max_new_tokens = 1: at least 2"),
    ],
)
def test_bad_requests_end_before_a_server_starts(
    target: Path, tmp_path: Path, further: list[str], problem: str
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [chat("c", words(0, 5))])
    with pytest.raises(SystemExit, match=problem):
        regenerate.main([*arguments(target, prompts, tmp_path / "out.jsonl"), *further])
    assert not (tmp_path / "out.jsonl.server").exists()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([chat("c", "w6"), chat("c", "w7")], "conversation ids repeat"),
        ([{"id": "c", "messages": []}], "prompt 1 needs the fields id, source and messages"),
        ([chat("c", "w6"), chat("d")], "prompt 2, 'd': empty conversation"),
        (
            [{"id": "c", "source": "s", "messages": [{"role": "user", "content": "w6"}] * 2}],
            "two user turns in a row",
        ),
    ],
)
def test_prompts_that_are_not_conversations_are_refused(
    target: Path, tmp_path: Path, rows: list[dict[str, Any]], problem: str
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", rows)
    with pytest.raises(SystemExit, match=problem):
        regenerate.main(arguments(target, prompts, tmp_path / "out.jsonl", "--managed", "cpu"))


def test_the_key_covers_every_input(target: Path, tmp_path: Path) -> None:
    # Soup#1067: the same prompts with another template, tokenizer, length or model are another job.
    copy = save_target(tmp_path / "copy")
    prompts = write(tmp_path / "prompts.jsonl", [chat("c", words(0, 5))])

    def inputs(folder: Path = copy, **changed: Any) -> dict[str, Any]:
        settings = {"max_length": 64, "dtype": "float32", "max_new_tokens": 8} | changed
        return job_inputs(folder, AutoTokenizer.from_pretrained(folder), prompts, Settings(**settings))

    def differing(then: dict[str, Any], now: dict[str, Any]) -> set[str]:
        return {name for name in then if then[name] != now[name]}

    first = inputs()
    assert inputs() == first and inputs(target) == first, "the same content elsewhere is the same"
    for name, value in (
        ("max_length", 65),
        ("dtype", "bfloat16"),
        ("max_new_tokens", 9),
        ("temperature", 0.5),
        ("thinking", False),
    ):
        assert differing(first, inputs(**{name: value})) == {name}
    assert inputs(batch=7) == first, "how many go together changes nothing"
    write(prompts, [chat("c", words(1, 5))])
    assert differing(first, second := inputs()) == {"prompts"}
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = TEMPLATE.replace("w5", "w6")
    tokenizer.save_pretrained(copy)
    assert differing(second, third := inputs()) == {"chat_template"}
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(copy)
    assert "tokenizer" in differing(third, fourth := inputs())
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert differing(fourth, inputs()) == {"target"}
