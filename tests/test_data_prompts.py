"""Choosing prompts: deterministic, disjoint, and every odd conversation skipped, counted and reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep.conversations import OddConversation, file_entries, read_messages
from data_prep.prompts import first_turn, main, select, turn_key

PACKAGES = ["chatterbot", "reasoning-gym"]


def user(text: Any) -> dict[str, Any]:
    return {"from": "human", "value": text}


def bot(text: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


ODD = [
    ({"conversations": []}, "empty conversation"),
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
    ({"conversations": [{"from": "tool", "value": "a"}]}, "unknown role"),
    ({"conversations": [{"value": "a"}]}, "unknown role"),
    ({"conversations": ["a"]}, "a message is not a JSON object"),
    ({"conversations": None}, "the conversation is not a list"),
    ({"text": "a"}, "none of the fields conversations, messages, prompt, question, problem"),
    ([], "not a JSON object"),
    (None, "not a JSON object"),
]


@pytest.mark.parametrize(("entry", "reason"), ODD)
def test_odd_conversations_are_named(entry: Any, reason: str) -> None:
    # SpecForge#482, #221
    with pytest.raises(OddConversation) as caught:
        read_messages(entry, 4)
    assert caught.value.reason == reason


def test_both_shapes_and_single_questions_are_read() -> None:
    system = {"role": "system", "content": "Be kind."}
    asked = [{"role": "user", "content": "a"}]
    assert read_messages({"conversations": [user("a"), bot("b")]}, 4) == asked
    assert read_messages({"messages": [system, *asked]}, 4) == [system, *asked]
    assert read_messages({"question": "a", "answer": "4"}, 4) == asked


def test_turns_are_capped_and_end_with_the_user() -> None:
    entry = {"conversations": [user("a"), bot("b"), user("c"), bot("d"), user("e"), bot("f")]}
    for turns, kept in ((1, "a"), (2, "abc"), (3, "abcde"), (9, "abcde")):
        assert "".join(part["content"] for part in read_messages(entry, turns)) == kept


def test_skipped_entries_are_reported_with_line_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.dumps({"conversations": [user("Hello?")]})
    lines = [good, *(json.dumps(entry) for entry, _ in ODD), '{"conversations": [', "", good.replace("H", "h")]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    main(["--sources", f"file:{tmp_path / 'chats.jsonl'}", "--out", str(tmp_path / "out")])
    skipped = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    expected = [(number, reason) for number, (_, reason) in enumerate(ODD, 2)]
    expected.append((len(ODD) + 2, "not JSON"))
    assert [(row["line"], row["reason"]) for row in skipped[:-1]] == expected
    assert (skipped[-1]["line"] in (1, len(lines))) and skipped[-1]["reason"] == "duplicate first turn"
    message = capsys.readouterr().err
    assert f"skipped {len(ODD) + 2} entries" in message and "3 × assistant first" not in message
    assert "2 × assistant first" in message and "1 × two user turns in a row" in message
    assert len((tmp_path / "out" / "train.jsonl").read_text().splitlines()) == 1


def test_arrays_know_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('[\n {"prompt": "a"},\n\n {"prompt":\n  "b"}, 5\n]\n')
    assert list(file_entries(path)) == [(2, {"prompt": "a"}), (4, {"prompt": "b"}), (5, 5)]
    path.write_text(" []")
    assert list(file_entries(path)) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", '[{"prompt": "a"},\n {"pro', "line 2: the array is broken"),
        ("a.json", '[{"prompt": "a"}\n {"prompt": "b"}]', "expected after an entry"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', r"call it \.jsonl"),
        ("a.txt", "hello", r"use a \.jsonl or \.jsonl\.gz file"),
    ],
)
def test_broken_files_are_errors(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=problem):
        select([f"file:{tmp_path / name}"], limit=1, heldout=0, seed=0)


def run(out: Path, seed: int, hash_seed: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "data_prep.prompts", "--sources", ",".join(PACKAGES), "--out", str(out)]
    command += ["--limit", "60", "--heldout", "30", "--seed", str(seed)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": hash_seed}, cwd=Path(__file__).parent.parent)
    return (out / "train.jsonl").read_text(), (out / "heldout.jsonl").read_text()


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    first = run(tmp_path / "a", 0, "1")
    assert run(tmp_path / "b", 0, "2") == first, "another process, another hash seed"
    other = select(PACKAGES, limit=60, heldout=30, seed=1)
    assert [row["id"] for row in other.train] != [json.loads(line)["id"] for line in first[0].splitlines()]


def keys(rows: list[dict[str, Any]]) -> list[str]:
    return [turn_key(first_turn(row["messages"])) for row in rows]


def test_heldout_first_turns_are_never_trained_on() -> None:
    chosen = select(PACKAGES, limit=600, heldout=100, seed=3)
    assert (len(chosen.train), len(chosen.heldout)) == (600, 100)
    together = keys(chosen.train) + keys(chosen.heldout)
    assert len(set(together)) == 700
    assert len({row["id"] for row in chosen.train + chosen.heldout}) == 700
    counts = [sum(row["source"] == "chatterbot" for row in rows) for rows in (chosen.train, chosen.heldout)]
    assert counts == [300, 50], "equal shares"
    banned = set(keys(chosen.heldout))
    said = {turn_key(part["content"]) for row in chosen.train for part in row["messages"] if part["role"] == "user"}
    assert not banned & said


def test_chatterbot_holds_what_it_is_known_for() -> None:
    chosen = select(["chatterbot"], limit=None, heldout=0, seed=0)
    assert 740 <= len(chosen.train) <= 749
    assert sum(skip.reason == "duplicate first turn" for skip in chosen.skipped) > 1000
    assert any(len(row["messages"]) > 1 for row in chosen.train)


def chats(path: Path, *first_turns: str, later: str | None = None) -> str:
    rows = [{"conversations": [user(text)] + ([bot("ok"), user(later)] if later else [])} for text in first_turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"file:{path}"


def test_case_and_white_space_do_not_make_a_turn_new(tmp_path: Path) -> None:
    source = chats(tmp_path / "a.jsonl", "What is  this?", "what is THIS? ", "Straße", "STRASSE", "other")
    chosen = select([source], limit=None, heldout=1, seed=0)
    assert len(chosen.train) == 2 and len(chosen.heldout) == 1
    assert len(set(keys(chosen.train + chosen.heldout))) == 3


def test_a_heldout_first_turn_may_not_hide_in_a_later_turn(tmp_path: Path) -> None:
    sources = [
        chats(tmp_path / "a.jsonl", "one", "two", "three", later="The hidden question"),
        chats(tmp_path / "b.jsonl", "the hidden  question"),
        chats(tmp_path / "c.jsonl", "four", "five"),
    ]
    chosen = select(sources, limit=None, heldout=2, seed=0)  # one of a, one of b
    assert "the hidden question" in keys(chosen.heldout)
    assert sorted(keys(chosen.train)) == ["five", "four"]
    assert [skip.reason for skip in chosen.skipped] == ["holds a held-out first turn"] * 2


def test_a_hub_data_set_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    chats(tmp_path / "set" / "train.jsonl", "a", "b", "c")
    chats(tmp_path / "set" / "test.jsonl", "d")
    whole = select([f"hub:{tmp_path / 'set'}"], limit=None, heldout=0, seed=0)
    assert sorted(keys(whole.train)) == ["a", "b", "c"]
    test = select([f"hub:{tmp_path / 'set'}:test"], limit=None, heldout=0, seed=0)
    assert keys(test.train) == ["d"] and test.train[0]["source"].startswith("hub:")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"specs": ["sharegpt"]}, "source 'sharegpt' is unknown: use chatterbot, reasoning-gym, file:PATH"),
        ({"specs": ["file:/nowhere.jsonl"]}, "no such file"),
        ({"specs": ["reasoning-gym"]}, "limit is not set"),
        ({"specs": ["chatterbot"], "heldout": 5000}, "too few for heldout = 5000"),
        ({"specs": ["chatterbot"], "limit": 0}, "limit = 0"),
        ({"specs": ["chatterbot"], "max_turns": 0}, "max_turns = 0"),
    ],
)
def test_bad_requests_say_what_would_work(arguments: dict[str, Any], problem: str) -> None:
    settings = {"limit": None, "heldout": 0, "seed": 0} | arguments
    with pytest.raises(ValueError, match=problem):
        select(settings.pop("specs"), **settings)
