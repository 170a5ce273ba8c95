"""Drafts that others wrote: the reference layout, SpecForge's own DSpine, plain DFlash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specforge_dspine.export import main
from specforge_dspine.formats.config_json import BRIDGE, LAYOUTS
from specforge_dspine.formats.reader import OWN_KEYS, load_draft
from specforge_dspine.formats.writer import write_checkpoint
from specforge_dspine.utils.errors import CheckpointError
from tests.formats.conftest import Change, config_of, damaged
from tests.support.drafts import MASK_ID, VOCAB, make_model


def save_reference(folder: Path, exported: Path, *, nested: bool) -> Path:
    """The reference layout: no buffers, codes beside the weights, fewer flags."""
    folder.mkdir()
    tensors = load_file(exported / "model.safetensors")
    save_file({"codes": tensors.pop("transfer_codes")}, folder / "transfer.safetensors")
    del tensors["transfer_ready"]
    save_file(tensors, folder / "model.safetensors")
    config = config_of(exported)
    for name in ("is_causal", "layer_types", "rope_parameters"):
        del config[name]
    del config["dflash_config"]["causal"], config["dflash_config"]["block_size"]
    del config["dspine_config"]["excluded_ids"], config["dspine_config"]["valid_vocab_size"]
    content = {"format": 1, "config": config} if nested else config
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nested", [False, True], ids=["flat config", "nested config"])
def test_a_reference_checkpoint_becomes_ours(
    exported: dict[str, Path], tmp_path: Path, layout: str, nested: bool
) -> None:
    reference = save_reference(tmp_path / "reference", exported["specforge"], nested=nested)
    assert main(["--draft", str(reference), "--to", layout, "--out", str(tmp_path / "out")]) == 0
    converted, original = (load_draft(path).tensors for path in (tmp_path / "out", exported[layout]))
    assert converted.keys() == original.keys()
    assert all(torch.equal(converted[name], original[name]) for name in original)
    expected = config_of(exported[layout])
    expected["dspine_config"] |= {"excluded_ids": [MASK_ID], "valid_vocab_size": VOCAB}  # all that can be known
    assert config_of(tmp_path / "out") == expected


def test_a_reference_checkpoint_without_its_table_is_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    reference = save_reference(tmp_path / "reference", exported["specforge"], nested=True)
    (reference / "transfer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"transfer\.safetensors cannot be read"):
        load_draft(reference)


def edit(folder: Path, change: Change) -> None:
    payload = config_of(folder)
    change(payload)
    (folder / "config.json").write_text(json.dumps(payload), encoding="utf-8")


def replace_codes(folder: Path, **tensors: Tensor) -> None:
    save_file(tensors, folder / "transfer.safetensors")


BAD_REFERENCES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: replace_codes(path, table=torch.zeros(1)), r"missing tensors: codes \(in transfer\.safetensors\)"),
    (lambda path: replace_codes(path, codes=torch.zeros(VOCAB, 12).half()), "codes is torch.float16, and must be"),
    (lambda path: replace_codes(path, codes=torch.ones(3, 12)), r"transfer_codes is \(3, 12\), the config says"),
    (lambda path: edit(path, lambda c: c["dflash_config"].pop("mask_token_id")), r"dflash_config\.mask_token_id is"),
    (lambda path: edit(path, lambda c: c["dflash_config"].pop("target_layer_ids")), "target_layer_ids=None"),
    (lambda path: edit(path, lambda c: c.pop("block_size")), "block_size is missing"),
    (lambda path: edit(path, lambda c: c.pop("hidden_size")), "hidden_size is missing"),
    (lambda path: edit(path, lambda c: c.pop("rope_theta")), "rope_theta=None"),
    (lambda path: edit(path, lambda c: c["dspine_config"].pop("transfer_rank")), r"dspine_config\.transfer_rank"),
    (lambda path: edit(path, lambda c: c.update(is_causal=False)), "is_causal is false"),
]


@pytest.mark.parametrize(("change", "message"), BAD_REFERENCES, ids=[m for _, m in BAD_REFERENCES])
def test_reference_checkpoints_that_lack_something_are_refused(
    exported: dict[str, Path],
    tmp_path: Path,
    change: Callable[[Path], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = save_reference(tmp_path / "reference", exported["specforge"], nested=False)
    change(reference)
    assert main(["--draft", str(reference), "--to", "sglang", "--out", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def in_tree(config: dict[str, Any]) -> None:
    """As SpecForge's own DSpine writes it: eleven keys, flags at the top level only, RoPE in the old spelling."""
    config["dspine_config"] = {key: value for key, value in config["dspine_config"].items() if key not in OWN_KEYS}
    assert len(config["dspine_config"]) == 11
    config["dflash_config"] = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    del config["rope_parameters"]


class Tokenizer:
    """What is asked of a tokenizer: 60 entries, a hole at 7, one reserved token."""

    pad_token_id = eos_token_id = bos_token_id = unk_token_id = None
    chat_template = ""
    added_tokens_decoder = {9: SimpleNamespace(content="<|reserved_9|>")}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {f"t{k}": k for k in range(60) if k != 7}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_specforges_own_draft_becomes_ours(exported: dict[str, Path], tmp_path: Path, layout: str) -> None:
    source = damaged(exported["specforge"], tmp_path / "in-tree", config=in_tree)
    draft = load_draft(source)
    assert draft.layout == "specforge"
    assert main(["--draft", str(source), "--to", layout, "--out", str(tmp_path / "out")]) == 0
    expected = config_of(exported[layout])
    expected["dspine_config"] |= {"excluded_ids": [MASK_ID], "valid_vocab_size": VOCAB}
    assert config_of(tmp_path / "out") == expected
    original = load_draft(exported[layout]).tensors
    assert all(torch.equal(value, original[name]) for name, value in load_draft(tmp_path / "out").tensors.items())
    settings = load_draft(source, tokenizer=Tokenizer()).config.dspine_config  # type: ignore[arg-type]
    assert settings["excluded_ids"] == [7, 9, MASK_ID] and settings["valid_vocab_size"] == 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dspine_config"].pop("message_size"), r"dspine_config\.message_size"),
        (lambda c: c.update(is_causal=False), "is_causal is false"),
        (lambda c: c.pop("block_size"), "block_size is missing"),
        (lambda c: c["dspine_config"].update(excluded_ids=[1]), "rope_parameters is missing"),  # ours, and damaged
    ],
)
def test_specforges_own_draft_is_read_strictly(
    exported: dict[str, Path], tmp_path: Path, change: Change, message: str
) -> None:
    source = damaged(exported["specforge"], tmp_path / "in-tree", config=in_tree)
    edit(source, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(source)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A plain DFlash as others publish it: bidirectional by default, no section of ours, no flags."""
    model = make_model(dtype=torch.float32, injection=False, alignment="off", causal=False, replacement_layers=0)
    draft = model.draft_model
    write_checkpoint(dict(draft.state_dict()), draft.config, "sglang", tmp_path / "plain", torch.float32)

    def strip(config: dict[str, Any]) -> None:
        for key in ("dspine_config", "is_causal", "rope_parameters", "layer_types"):
            del config[key]
        in_dflash = config["dflash_config"]
        config["dflash_config"] = {key: in_dflash[key] for key in ("mask_token_id", "target_layer_ids")}

    edit(tmp_path / "plain", strip)
    return tmp_path / "plain"


def test_a_plain_dflash_becomes_ours(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = load_draft(plain, tokenizer=Tokenizer())  # type: ignore[arg-type]
    assert draft.layout == "dflash" and not draft.config.is_causal and draft.to_model().injection is None
    assert draft.config.dspine_config["excluded_ids"] == [7, 9, MASK_ID]
    for layout in LAYOUTS:
        assert main(["--draft", str(plain), "--to", layout, "--out", str(tmp_path / layout)]) == 0
        assert "from the dflash layout" in capsys.readouterr().out
        written = load_draft(tmp_path / layout)
        assert written.layout == layout and BRIDGE not in config_of(tmp_path / layout)["dflash_config"]
        assert all(torch.equal(written.tensors[name], value) for name, value in draft.tensors.items())
    assert "--speculative-algorithm DFLASH" in (tmp_path / "sglang" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("num_target_layers"), "num_target_layers is missing"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), r"dflash_config\.mask_token_id is missing"),
        (lambda c: c["dflash_config"].update(mask_token_id=VOCAB), f"mask_token_id ?= ?{VOCAB}"),
        (lambda c: c.update(is_causal="so"), r"dspine_config\.causal='so'"),
        (lambda c: c.pop("dflash_config"), "neither dspine_config nor dflash_config"),
        (lambda c: c["dflash_config"].update({BRIDGE: {}}), "dspine_config is missing"),
    ],
)
def test_a_plain_dflash_is_read_strictly(plain: Path, change: Change, message: str) -> None:
    edit(plain, change)
    for tokenizer in (None, Tokenizer()):
        with pytest.raises(ValueError, match=message):
            load_draft(plain, tokenizer=tokenizer)  # type: ignore[arg-type]


def test_unknown_tensors_of_a_plain_dflash_are_refused(plain: Path, tmp_path: Path) -> None:
    source = damaged(plain, tmp_path / "more", tensors=lambda t: t.update({"markov.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unknown tensors: markov\.weight"):
        load_draft(source)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_own_layouts_are_told_apart(exported: dict[str, Path], tmp_path: Path, layout: str) -> None:
    assert load_draft(exported[layout]).layout == layout
    for other in LAYOUTS:  # and convert into each other, byte for byte
        assert main(["--draft", str(exported[layout]), "--to", other, "--out", str(tmp_path / other)]) == 0
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / other / name).read_bytes() == (exported[other] / name).read_bytes()
