"""The plan of samples and the log of deliveries: order, epochs, several resumes, cut lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specforge_dspine.training.capture_source import Delivery, PromptPlan, read_samples, resume_delivery
from specforge_dspine.utils.errors import RecipeError
from tests.support.small import write_samples


def test_every_epoch_is_a_fresh_permutation(tmp_path: Path) -> None:
    samples = read_samples(str(write_samples(tmp_path / "s.jsonl", 10)), max_length=64)
    plan = PromptPlan(samples, seed=3)
    names = [plan[position].name for position in range(20)]
    assert sorted(names[:10]) == sorted(f"e0000-{sample.name}" for sample in samples)
    assert sorted(names[10:]) == sorted(f"e0001-{sample.name}" for sample in samples)
    assert [name[6:] for name in names[:10]] != [name[6:] for name in names[10:]]
    assert [PromptPlan(samples, seed=3)[position].name for position in (15, 2, 7)] == [names[15], names[2], names[7]]


def test_equal_samples_get_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    line = json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    first, second = read_samples(str(path), max_length=64)
    assert second.name == f"{first.name}-1"


def test_conversations_are_not_samples(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"data_prep\.regenerate"):
        read_samples(str(path), max_length=64)


def write_log(path: Path, numbers: list[int], positions: list[int], after: int) -> None:
    with open(path, "a", encoding="utf-8") as stream:
        for number, position in zip(numbers, positions, strict=True):
            stream.write("\n" + json.dumps({"number": number, "sample": "s", "position": position, "next": after}))


def test_resuming_twice_delivers_the_same_samples(tmp_path: Path) -> None:
    """Killed after number 5, resumed at 2, killed after redelivering 2 and 3, resumed again: 4 and 5 still come."""
    log = tmp_path / "delivered.jsonl"
    write_log(log, [0, 1, 2, 3, 4, 5], [0, 1, 7, 3, 4, 5], 8)
    with open(log, "a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps({"dropped": "sample 'x': bad", "next": 8}) + '\n{"number": 6, "sam')
    before = log.read_bytes()
    first = resume_delivery(log, 2)
    assert (first.delivered, first.pending, first.next) == (2, [7, 3, 4, 5], 8)
    assert first.dropped == ["sample 'x': bad"]
    assert log.read_bytes() == before, "looking changes nothing"
    assert first.take(2) == [7, 3]
    write_log(log, [2, 3], [7, 3], 8)
    second = resume_delivery(log, 2)
    assert second.pending == [7, 3, 4, 5] and second.next == 8
    assert second.take(6) == [7, 3, 4, 5, 8, 9]


def test_a_capture_that_was_cut_short_is_asked_for_again(tmp_path: Path) -> None:
    """Killed after a bad record was logged and before the good ones of the same capture were: none is lost."""
    log = tmp_path / "delivered.jsonl"
    write_log(log, [0, 1], [0, 2], 3)
    for _ in range(2):  # the second time after a resume that was killed at the same place
        with open(log, "a", encoding="utf-8") as stream:
            stream.write("\n" + json.dumps({"dropped": "sample 'x': bad"}))
    state = resume_delivery(log, 2)
    assert state.take(3) == [3, 4, 5]
    assert state.dropped == ["sample 'x': bad"], "counted once"


def test_a_checkpoint_beyond_the_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "delivered.jsonl"
    write_log(log, [0, 1], [0, 1], 2)
    with pytest.raises(RecipeError, match="2 delivered samples are logged, the checkpoint used 4"):
        resume_delivery(log, 4)
    assert resume_delivery(tmp_path / "none", 0) == Delivery()
