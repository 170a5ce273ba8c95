"""Fingerprints of models: other weights are another model, in every format that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specforge_dspine.utils.files import model_fingerprint

FORMATS = {
    "one safetensors file": ["model.safetensors"],
    "sharded safetensors": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    "one .bin file": ["pytorch_model.bin"],
    "sharded .bin files": ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
}


def model(folder: Path, names: list[str], last: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in names:
        (folder / name).write_bytes(bytes(1000) + (last if name == names[-1] else b"0"))
    return folder


@pytest.mark.parametrize("names", FORMATS.values(), ids=FORMATS)
def test_other_weights_have_another_fingerprint(tmp_path: Path, names: list[str]) -> None:
    one, same, other = (model(tmp_path / f"{k}", names, last) for k, last in enumerate((b"1", b"1", b"2")))
    assert model_fingerprint(one) == model_fingerprint(same) != model_fingerprint(other)
