"""Inspecting samples: masks in color, histograms, anchors, and a warning for every problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from data_prep import inspect
from data_prep.samples.statistics import Sample, SampleStatistics, TargetVocabulary, histogram, read_sample
from specforge_dspine.utils.chat_template import SHORT
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import model_fingerprint
from tests.support.commands import refuse, succeed
from tests.support.small import ENTRIES, save_tokenizer
from tests.support.targets import EOS, VOCAB, build_llama

VOCABULARY = TargetVocabulary(VOCAB, frozenset({EOS}), 0, ENTRIES, frozenset({1}))


def sample(ids: list[int], mask: list[int], **changed: Any) -> Sample:
    facts = {"place": "f, line 1", "prompt_tokens": 2, "finish": "stop", "origin": "mine"} | changed
    return Sample(input_ids=ids, loss_mask=mask, **facts)


GOOD = sample([5, 6, *range(10, 20), EOS], [0, 0] + [1] * 11)


@pytest.mark.parametrize(
    ("changed", "problems"),
    [
        ({}, []),
        ({"loss_mask": [0] * 13}, ["no supervised token"]),
        ({"loss_mask": [0, 0, *[1, 0] * 5, 1]}, ["no anchor: no two supervised tokens in a row"]),
        ({"loss_mask": [0] * 8 + [1] * 5}, ["fewer than 8 anchors"]),
        ({"loss_mask": [0] + [1] * 12}, ["the mask covers the prompt"]),
        ({"loss_mask": [1] * 13}, ["the mask covers the prompt", "everything is supervised, there is no prompt"]),
        ({"origin": "dataset"}, ["the response is not from this target"]),
        ({"origin": None}, ["the response is not from this target"]),
        ({"input_ids": [VOCAB, *GOOD.input_ids[1:]]}, ["ids outside of the vocabulary"]),
        ({"input_ids": [-1, *GOOD.input_ids[1:]]}, ["ids outside of the vocabulary"]),
        ({"input_ids": [ENTRIES, *GOOD.input_ids[1:]]}, ["the mask token occurs"]),
        ({"input_ids": [5, 6, 0, *range(11, 20), EOS]}, ["padding is supervised"]),
        ({"input_ids": [5, 6, 1, *range(11, 20), EOS]}, ["the template's markers are supervised"]),
        ({"input_ids": [5, 6, EOS, *range(11, 20), EOS]}, ["an end token is supervised before the response ends"]),
        ({"input_ids": [5, 6, *range(10, 21)]}, ["ends by itself, but its end is not supervised"]),
        ({"input_ids": [5, 6, *range(10, 21)], "finish": "length"}, []),
    ],
)
def test_every_problem_is_warned_of(changed: dict[str, Any], problems: list[str]) -> None:
    looked_at = sample(**({"ids": GOOD.input_ids, "mask": GOOD.loss_mask} | _renamed(changed)))
    assert SampleStatistics(VOCABULARY, "mine").problems(looked_at) == problems


def _renamed(changed: dict[str, Any]) -> dict[str, Any]:
    names = {"input_ids": "ids", "loss_mask": "mask"}
    return {names.get(name, name): value for name, value in changed.items()}


def test_anchors_have_a_supervised_token_behind_them() -> None:
    assert sample([1] * 7, [0, 1, 1, 1, 0, 1, 0]).anchors == 2


def test_histograms_count_every_value() -> None:
    values = [3, 3, 4, 50, 51, 100]
    ranges = histogram(values)
    assert sum(number for _, _, number in ranges) == len(values) and len(ranges) <= 12
    assert all(number == sum(low <= value <= high for value in values) for low, high, number in ranges)
    assert histogram([7]) == [(7, 7, 1)]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (5, "not a JSON object"),
        ({"input_ids": [1]}, "no input_ids or loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "ids and mask differ in length"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "ids are not lists of integers"),
        ({"input_ids": [1], "loss_mask": [2]}, "the mask holds other values than 0 and 1"),
        ({"input_ids": [1], "loss_mask": [1], "prompt_tokens": "2"}, "prompt_tokens is not a number"),
        ({"input_ids": [1], "loss_mask": [1], "origin": ["a"]}, "finish or origin is not text"),
        ({"input_ids": [1], "loss_mask": [1], "finish": 5}, "finish or origin is not text"),
    ],
)
def test_what_is_no_sample_is_named(entry: Any, reason: str) -> None:
    with pytest.raises(InvalidRow) as caught:
        read_sample("f", entry)
    assert caught.value.reason == reason


def test_the_command_shows_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_tokenizer(build_llama(tmp_path / "llama"))
    own = model_fingerprint(target)[:SHORT]
    row = {"input_ids": GOOD.input_ids, "loss_mask": GOOD.loss_mask, "prompt_tokens": 2, "finish": "stop"}
    rows = [row | {"origin": own}, row | {"origin": "<dataset>"}, 5]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps(each) + "\n" for each in rows))
    out = tmp_path / "page.html"
    command = ["--input", str(samples), "--output", str(out), "--target", str(target), "--show", "1"]
    succeed(inspect.main, command)
    shown = capsys.readouterr().out
    assert "w5 w6⟦w10 w11" in shown and "10 anchors" in shown
    assert f"warning: 1 × the response is not from this target ({samples}, line 2)" in shown
    succeed(inspect.main, [*command, "--color", "--show", "2"])
    assert "\x1b[32mw10 w11" in capsys.readouterr().out, "looking again is no error"
    page = out.read_text()
    assert '<span class="supervised">w10 w11' in page and "&lt;dataset&gt;" in page and "<dataset>" not in page
    summary = json.loads(Path(f"{out}.summary.json").read_text())
    assert (summary["rows_in"], summary["rows_kept"], summary["anchors"]) == (3, 2, 20)
    assert summary["rows_dropped"] == {"not a JSON object": 1}
    assert summary["warnings"] == {"the response is not from this target": 1}


def test_invalid_samples_are_shown_and_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_tokenizer(build_llama(tmp_path / "llama"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["\x1b[31mred\x9b\u202e"])
    tokenizer.save_pretrained(target)
    row = {"input_ids": GOOD.input_ids, "loss_mask": GOOD.loss_mask, "prompt_tokens": 2}
    invalid = [row | {"input_ids": [token, *GOOD.input_ids[1:]]} for token in (-1, 2**40, VOCAB, len(tokenizer) - 1)]
    samples = tmp_path / "samples.jsonl"
    samples.write_text(
        "".join(json.dumps(each | {"origin": "\x1b[2J"}) + "\n" for each in [*invalid, row | {"finish": 5}])
    )
    out = tmp_path / "page.html"
    Path(f"{out}.summary.json").write_text("{}")
    command = ["--input", str(samples), "--output", str(out), "--target", str(target)]
    refuse(inspect.main, command, r"summary\.json is not a summary that this command wrote")
    succeed(inspect.main, [*command, "--overwrite"])
    shown = capsys.readouterr().out
    assert "<-1?>" in shown and f"<{2**40}?>" in shown and f"<{VOCAB}?>" in shown
    assert "warning: 3 × ids outside of the vocabulary" in shown
    assert "\x1b" not in shown and "\x9b" not in shown and "\u202e" not in shown
    assert "\\x1b[31mred\\x9b\\u202e" in shown and "\\x1b[2J" in shown
    assert f"5 rows read, 4 of them good; see {out}" in shown
