"""A job's output file: it continues after a kill, and is never taken for another job's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.ledger import Key, Ledger, Record

INPUTS = {"target": "abc", "max_length": 512, "thinking": None}


def key(record: Record) -> Key:
    return record["name"], record["turn"]


def rows(*numbers: int) -> list[Record]:
    return [{"name": f"ü{number}", "turn": 0} for number in numbers]


def open_ledger(out: Path, **changed: Any) -> Ledger:
    return Ledger(out, INPUTS | changed, key)


def finished(out: Path) -> Path:
    with open_ledger(out) as ledger:
        ledger.append(rows(1, 2))
        ledger.finish(rows(1, 2), {"samples": 2})
    return out


def test_a_finished_job_is_recognised(tmp_path: Path) -> None:
    out = finished(tmp_path / "deep" / "out.jsonl")
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows(1, 2)
    assert open_ledger(out).is_finished()
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.jsonl", "out.jsonl.meta.json"]


@pytest.mark.parametrize("changed", [{"max_length": 256}, {"thinking": False}, {"target": "abd"}, {"new": 1}])
def test_every_changed_input_is_refused_by_name(tmp_path: Path, changed: dict[str, Any]) -> None:
    # Soup#1067: cached features were reused after the template, the length or the tokenizer had changed.
    out = finished(tmp_path / "out.jsonl")
    (name, value), *_ = changed.items()
    with pytest.raises(ValueError, match=rf"{name} was .* and is now {value!r}.*--overwrite"):
        open_ledger(out, **changed).is_finished()
    ledger = open_ledger(out, **changed)
    ledger.discard()
    assert not ledger.is_finished()


def test_an_unfinished_job_with_other_inputs_is_refused_too(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl") as ledger:
        ledger.append(rows(1))
    with pytest.raises(ValueError, match="target was 'abc'"):
        open_ledger(tmp_path / "out.jsonl", target="x").is_finished()


def test_foreign_and_altered_files_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ValueError, match=r"without out\.jsonl\.meta\.json"):
        open_ledger(out).is_finished()
    out.unlink()
    finished(out).write_text("altered\n")
    with pytest.raises(ValueError, match="changed after it was written"):
        open_ledger(out).is_finished()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_cut_last_line_is_dropped_and_written_again(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "out.jsonl"
    with open_ledger(out) as ledger:
        ledger.append(rows(1, 2))
        ledger.append(rows(3, 4))
    partial = tmp_path / "out.jsonl.partial"
    whole = partial.read_bytes()
    partial.write_bytes(whole[:-cut])
    with open_ledger(out) as ledger:
        assert list(ledger.records.values()) == rows(1, 2)
        ledger.append(rows(3, 4))
        assert partial.read_bytes() == whole
    with open_ledger(out) as ledger:
        assert list(ledger.records.values()) == rows(1, 2, 3, 4)


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl") as ledger:
        ledger.append(rows(1))
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(b"{]\n" + partial.read_bytes())
    with pytest.raises(ValueError, match="line 1 is damaged"), open_ledger(tmp_path / "out.jsonl"):
        pass


def test_killed_while_finishing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_ledger(out) as ledger:
        ledger.append(rows(1))
    out.write_text("the file was there, its hash was not yet\n")
    assert not open_ledger(out).is_finished()
    with open_ledger(out) as ledger:
        ledger.finish(ledger.records.values(), {})
    assert open_ledger(out).is_finished()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "out.jsonl"):
        for enter in (open_ledger(tmp_path / "out.jsonl").__enter__, open_ledger(tmp_path / "out.jsonl").discard):
            with pytest.raises(ValueError, match="another process"):
                enter()
