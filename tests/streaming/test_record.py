"""Names, layer ids and the checks that every record passes before it is trained on."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specforge_dspine.streaming.protocol import check_layers, mask_to_spans, safe_name, spans_to_mask
from specforge_dspine.streaming.record import (
    RecordError,
    Sample,
    SampleNames,
    TargetIdentity,
    check_record,
    read_record,
    sample_name,
)
from tests.support.targets import HIDDEN, LAYERS, VOCAB

TARGET = TargetIdentity("/models/t", num_layers=6, hidden_size=4, vocab_size=32, layers=(0, 3), dtype="float32")
SAMPLE = Sample("s1", [5, 6, 7, 8, 9], [0, 0, 1, 0, 1])


def good_record() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor(SAMPLE.input_ids),
        "loss_mask": torch.tensor(SAMPLE.loss_mask),
        "hidden_states": torch.randn(1, 5, 8),
        "target_last_hidden_states": torch.randn(1, 5, 4),
    }


def test_a_good_record_passes_and_survives_the_disk(tmp_path: Path) -> None:
    record = good_record()
    torch.save(record, tmp_path / "s1.ckpt")
    read = read_record(tmp_path / "s1.ckpt")
    (tmp_path / "s1.ckpt").unlink()
    check_record(read, SAMPLE, TARGET)
    assert torch.equal(read["hidden_states"], record["hidden_states"])


def test_short_record_names_prefix_cache_and_chunks() -> None:
    record = {key: value[-3:] if value.dim() == 1 else value[:, -3:] for key, value in good_record().items()}
    with pytest.raises(RecordError, match=r"short record: 3 of 5 tokens.*prefix cache.*chunked prefill"):
        check_record(record, SAMPLE, TARGET)


def test_other_ids_are_located() -> None:
    record = good_record()
    record["input_ids"][3] = 30
    with pytest.raises(RecordError, match=r"record of another sequence: input_ids\[3\] = 30, but 8 was sent"):
        check_record(record, SAMPLE, TARGET)


@pytest.mark.parametrize("key", ["hidden_states", "target_last_hidden_states"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_values_are_located(key: str, value: float) -> None:
    record = good_record()
    record[key][0, 4, 1] = 1.0
    record[key][0, 2, 3] = value
    record[key][0, 3, 0] = value
    with pytest.raises(RecordError, match=f"'s1': {key} is {value} at token 2, channel 3"):
        check_record(record, SAMPLE, TARGET)


@pytest.mark.parametrize("key", ["input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"])
def test_every_tensor_is_needed_in_its_shape_and_dtype(key: str) -> None:
    missing = good_record()
    del missing[key]
    with pytest.raises(RecordError, match=f"{key} is missing"):
        check_record(missing, SAMPLE, TARGET)
    wide = good_record()
    wide[key] = torch.cat([wide[key], wide[key]], dim=-1)
    with pytest.raises(RecordError, match=f"{key} has shape"):
        check_record(wide, SAMPLE, TARGET)
    narrow = good_record()
    narrow[key] = narrow[key].to(torch.int32 if narrow[key].dtype == torch.int64 else torch.bfloat16)
    with pytest.raises(RecordError, match=f"{key} is torch.(int32|bfloat16), expected"):
        check_record(narrow, SAMPLE, TARGET)


def test_loss_mask_must_be_the_one_sent() -> None:
    record = good_record()
    record["loss_mask"][0] = 1
    with pytest.raises(RecordError, match="loss_mask is not the one"):
        check_record(record, SAMPLE, TARGET)


def test_the_dtype_is_the_targets() -> None:
    record = good_record()
    for key in ("hidden_states", "target_last_hidden_states"):
        record[key] = record[key].bfloat16()
    check_record(record, SAMPLE, replace(TARGET, dtype="bfloat16"))


def test_a_torn_file_is_a_record_error(tmp_path: Path) -> None:
    whole = tmp_path / "whole.ckpt"
    torch.save(good_record(), whole)
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(RecordError, match=r"'torn'.*cannot be read"):
        read_record(torn)
    torch.save([1, 2], torn)
    with pytest.raises(RecordError, match="list, not a dictionary"):
        read_record(torn)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "empty"),
        ([1, 1, 2], "without duplicates"),
        ([3, 1], "increase"),
        ([0, 5], "5 is the last layer"),
        ([0, 6], "6 is out of range"),
        ([-1, 2], "-1 is out of range"),
        ([1.0], "must be an integer"),
        ([True], "must be an integer"),
    ],
)
def test_bad_layer_ids_say_what_works(layers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"layers.*{message}.*from 0 to 4"):
        check_layers(layers, 6)


def test_good_layer_ids() -> None:
    assert check_layers([0, 4], 6) == (0, 4)


@pytest.mark.parametrize("name", ["a", "0f3c.1-r_X", "-1", "a..b", "x" * 200])
def test_safe_names(name: str) -> None:
    assert safe_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "a/b", "../a", "/a", "a\n", "a b", "ü", "a\0", "x" * 201, None]
)
def test_unsafe_names_are_refused_not_rewritten(name: str) -> None:
    with pytest.raises(ValueError, match="name = "):
        safe_name(name)


def test_equal_samples_get_different_names() -> None:
    names = SampleNames()
    first, other, second, third = (names.next(*pair) for pair in [([7], [1]), ([8], [1]), ([7], [1]), ([7], [1])])
    assert (second, third) == (f"{first}-1", f"{first}-2")
    assert first == sample_name([7], [1]) and other == sample_name([8], [1])


def test_sample_name_is_the_content() -> None:
    expected = hashlib.sha256(struct.pack("<4q", 7, 2**40, 0, 1)).hexdigest()[:16]
    assert sample_name([7, 2**40], [0, 1]) == expected
    assert sample_name([7, 8], [0, 0]) != sample_name([7, 8], [0, 1])


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 1, 1, 0, 1]])
def test_mask_and_spans_are_inverse(mask: list[int]) -> None:
    assert spans_to_mask(mask_to_spans(mask), len(mask)).tolist() == mask


def test_spans_of_a_mask() -> None:
    assert mask_to_spans([0, 1, 1, 0, 1]) == [[1, 3], [4, 5]]


@pytest.mark.parametrize("spans", [[[0, 4]], [[-1, 2]], [[2, 2]], [[1, 2], [0, 1]], [[0, 2], [1, 3]]])
def test_bad_spans(spans: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="within 3 tokens"):
        spans_to_mask(spans, 3)


@pytest.mark.parametrize(("ids", "mask"), [([], []), ([1, 2], [1]), ([1, 2], [1, 2])])
def test_malformed_samples(ids: list[int], mask: list[int]) -> None:
    with pytest.raises(ValueError, match=r"input_ids|loss_mask"):
        Sample("s", ids, mask)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_identity_comes_from_the_config(target_dirs: dict[str, Path], name: str) -> None:
    path = str(target_dirs[name])
    identity = TargetIdentity.from_config(path, [1, 4], "bfloat16")
    assert identity == TargetIdentity(path, LAYERS, HIDDEN, VOCAB, (1, 4), "bfloat16")
    with pytest.raises(ValueError, match=r"layers.*last layer"):
        TargetIdentity.from_config(path, [LAYERS - 1], "bfloat16")
    with pytest.raises(ValueError, match="dtype = 'int8'"):
        TargetIdentity.from_config(path, [1], "int8")
