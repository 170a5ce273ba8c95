"""Checkpoints on disk: both layouts from one state, strict reading by name, bit-exact round trips, safe writing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from specforge.modeling.auto import AutoDraftModel
from torch import Tensor

from specforge_dspine.export import export_run, main
from specforge_dspine.formats import config_json as formats
from specforge_dspine.formats import writer
from specforge_dspine.formats.config_json import BRIDGE, LAYOUTS, Layout
from specforge_dspine.formats.reader import load_draft
from specforge_dspine.formats.writer import write_checkpoint
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.state_dict import check_table
from specforge_dspine.objective.training_model import DSpineTrainingModel
from specforge_dspine.utils.errors import CheckpointError, InvalidFileError
from tests.formats.conftest import Change, config_of, damaged, save_run, save_state
from tests.support.drafts import MASK_ID, TAPS, VOCAB, make_batch, make_blocks, make_model


def test_both_layouts_hold_what_engines_would_otherwise_guess(exported: dict[str, Path]) -> None:
    configs = {layout: config_of(folder) for layout, folder in exported.items()}
    assert configs["specforge"].pop("architectures") == ["DSpineDraftModel"]
    assert configs["sglang"].pop("architectures") == ["DFlashDraftModel"]
    bridge = configs["sglang"]["dflash_config"].pop(BRIDGE)
    assert bridge == {"transfer_dim": 12, "message_dim": 8, "top_k": 6}
    assert configs["sglang"] == configs["specforge"]
    config = configs["sglang"]
    expected = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": 5,
        "is_causal": True,
        "layer_types": ["full_attention"] * 3,
        "num_hidden_layers": 3,
        "num_target_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dflash_config": {
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(range(TAPS)),  # 0-based, as they are
            "block_size": 5,
            "causal": True,
        },
    }
    assert {name: config.get(name) for name in expected} == expected
    assert config["dspine_config"] == {
        "transfer_rank": 12,
        "message_size": 8,
        "top_k": 6,
        "ce_weight": 0.1,
        "alignment_weight": 0.5,
        "alignment_warmup_steps": None,
        "replacement_layers": 2,
        "replacement_probability": 0.5,
        "replacement_hold_ratio": 1 / 6,
        "replacement_end_ratio": 1 / 3,
        "candidate_mass_threshold": 1e-4,
        "excluded_ids": [MASK_ID],
        "valid_vocab_size": VOCAB - 3,
        "causal": True,
        "injection": True,
        "refinement": True,
        "alignment": "cosine",
        "curriculum": True,
    }
    assert "auto_map" not in config and "transformers_version" not in config


def test_both_layouts_hold_the_newest_checkpoint_bit_for_bit(
    exported: dict[str, Path], state: dict[str, Tensor]
) -> None:
    sglang, specforge = (load_file(exported[layout] / "model.safetensors") for layout in LAYOUTS)
    assert sglang.keys() == specforge.keys() == state.keys()
    for name, value in state.items():
        wanted = value if name in ("transfer_codes", "transfer_ready") else value.to(torch.bfloat16)
        assert sglang[name].dtype == specforge[name].dtype == wanted.dtype, name
        assert torch.equal(sglang[name], wanted) and torch.equal(specforge[name], wanted), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exports_load_as_the_draft_they_came_from(
    exported: dict[str, Path], layout: str, state: dict[str, Tensor]
) -> None:
    draft = load_draft(exported[layout]).to_model()
    assert draft.transfer_codes.dtype is torch.float32 and torch.equal(draft.transfer_codes, state["transfer_codes"])
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16} and not draft.training
    assert draft.config.architectures == ["DSpineDraftModel"]
    again = exported[layout].parent / f"again-{layout}"
    write_checkpoint(draft.state_dict(), draft.config, layout, again, torch.bfloat16)
    assert (again / "model.safetensors").read_bytes() == (exported[layout] / "model.safetensors").read_bytes()
    assert config_of(again) == config_of(exported[layout])


def test_the_card_says_what_is_unverified(exported: dict[str, Path], run: Path, tmp_path: Path) -> None:
    sglang, specforge = (ModelCard.load(exported[layout] / "README.md") for layout in LAYOUTS)
    assert "**Unverified**" in sglang.text and "--speculative-num-draft-tokens 5" in sglang.text
    assert "from_pretrained" in specforge.text and "Unverified" not in specforge.text
    for layout, card in (("sglang", sglang), ("specforge", specforge)):
        assert card.data.to_dict() == {
            "base_model": "target",
            "library_name": "specforge-dspine",
            "license": "apache-2.0",
            "pipeline_tag": "text-generation",
            "tags": ["speculative-decoding", "draft-model", "dspine", layout],
        }
    assert main(["--draft", str(exported["sglang"]), "--to", "sglang", "--out", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model is None and "a target of 6 layers" in card.text


def outputs(trained: DSpineTrainingModel, draft: DSpineDraftModel, dtype: torch.dtype) -> Tensor:
    """The draft's hidden states over a batch, with the frozen parts of ``trained``."""
    model = make_model(dtype=dtype)
    model.load_state_dict(trained.to(dtype).state_dict())
    model.draft_model = draft
    batch = make_batch(dtype=dtype)
    blocks = make_blocks([[4, 8], [6]])
    with torch.no_grad():
        return model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks).hidden


@pytest.mark.parametrize("loader", [DSpineDraftModel, AutoDraftModel], ids=lambda loader: loader.__name__)
def test_from_pretrained_gives_the_same_draft(
    run: Path, tmp_path: Path, loader: Any, trained: DSpineTrainingModel
) -> None:
    """Ours, and SpecForge's own loader once our package is imported."""
    export_run(run, "specforge", tmp_path / "out", torch.float32)
    draft = loader.from_pretrained(tmp_path / "out")
    assert type(draft) is DSpineDraftModel
    loaded, original = draft.state_dict(), trained.draft_model.state_dict()
    assert loaded.keys() == original.keys()
    assert all(torch.equal(loaded[name], original[name]) for name in original)
    expected = outputs(trained, trained.draft_model, torch.float32)
    assert torch.equal(outputs(trained, draft, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "auto"], ids=str)
def test_the_table_stays_float32_whatever_is_loaded(
    exported: dict[str, Path], state: dict[str, Tensor], dtype: Any
) -> None:
    """pytorch#143900: buffers are cast with the module."""
    draft = DSpineDraftModel.from_pretrained(exported["specforge"], dtype=dtype)
    assert draft.fc.weight.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    for moved in (draft, draft.to(torch.bfloat16), draft.half(), draft.float().bfloat16()):
        assert moved.transfer_codes.dtype is torch.float32
        assert torch.equal(moved.transfer_codes, state["transfer_codes"])


def rename(old: str, new: str) -> Change:
    return lambda values: values.update({new: values.pop(old)})


def spoil(name: str, value: float) -> Change:
    return lambda values: values[name].view(-1).__setitem__(0, value)


BAD_TENSORS: list[tuple[Change, str]] = [
    (lambda t: t.pop("fc.weight"), "missing.*fc.weight"),
    (lambda t: t.pop("transfer_ready"), "missing.*transfer_ready"),
    (lambda t: t.update(surplus=torch.zeros(2)), "(unknown|unexpected).*surplus"),
    (rename("layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"), "missing.*layers.1.mlp.up_proj"),
    (lambda t: t.update({"injection.bias": torch.zeros(9, dtype=torch.bfloat16)}), "injection.bias.*9"),
    (spoil("norm.weight", torch.nan), "norm.weight holds a value that is not finite"),
    (spoil("transfer_codes", torch.inf), "transfer_codes holds a value that is not finite"),
    (spoil("transfer_codes", 3.0), "transfer_codes has rows of norm .* codes have norm 1"),
    (lambda t: t["transfer_codes"].zero_(), "transfer_codes has rows of norm 0 to 0"),
    (lambda t: t["transfer_ready"].fill_(False), "transfer_ready is not True"),
]
AT_REST: list[tuple[Change, str]] = [
    (lambda t: t.update(transfer_codes=t["transfer_codes"].bfloat16()), "transfer_codes is torch.bfloat16, and must"),
    (lambda t: t.update(transfer_codes=t["transfer_codes"].double()), "transfer_codes is torch.float64, and must"),
    (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "norm.weight is torch.float32, config.json says"),
    (lambda t: t.update({"norm.weight": t["norm.weight"].char()}), "norm.weight is torch.int8; weights must be"),
    (lambda t: t.update(transfer_ready=torch.tensor(1.0)), "transfer_ready is not True"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("change", "message"), BAD_TENSORS + AT_REST, ids=[m for _, m in BAD_TENSORS + AT_REST])
def test_reading_refuses_tensors_by_name(
    exported: dict[str, Path], tmp_path: Path, layout: str, change: Change, message: str
) -> None:
    folder = damaged(exported[layout], tmp_path / "bad", tensors=change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder)


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[m for _, m in BAD_TENSORS])
def test_from_pretrained_is_as_strict(
    exported: dict[str, Path], tmp_path: Path, change: Change, message: str
) -> None:
    folder = damaged(exported["specforge"], tmp_path / "bad", tensors=change)
    with pytest.raises(ValueError, match=message.replace("missing", "missing.keys")):
        DSpineDraftModel.from_pretrained(folder)


BAD_CONFIGS: list[tuple[Change, str]] = [
    (lambda c: c.pop("is_causal"), "is_causal is (null|false) and"),
    (lambda c: c.update(is_causal=False), "is_causal is (null|false) and"),
    (lambda c: c["dflash_config"].pop("causal"), "dflash_config.causal is null and"),
    (lambda c: c.pop("block_size"), "block_size is missing"),
    (lambda c: c["dflash_config"].pop("block_size"), "dflash_config.block_size=None differs from block_size=5"),
    (lambda c: c["dflash_config"].update(block_size=4), "dflash_config.block_size=4 differs"),
    (lambda c: c["dflash_config"].pop("mask_token_id"), "dflash_config.mask_token_id is missing"),
    (lambda c: c["dflash_config"].update(mask_token_id=VOCAB), f"mask_token_id={VOCAB} is outside the vocab"),
    (lambda c: c["dflash_config"].update(mask_token_id="63"), "mask_token_id='63' is not a whole number"),
    (lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids=None: increasing ids in 0..4"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[0, 5]), r"target_layer_ids=\[0, 5\]: increasing"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[1, 1]), r"target_layer_ids=\[1, 1\]: increasing"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[1, 0]), r"target_layer_ids=\[1, 0\]: increasing"),
    (lambda c: c.pop("num_target_layers"), "num_target_layers is missing"),
    (lambda c: c.pop("rope_theta"), "rope_theta=None"),
    (lambda c: c.pop("rope_parameters"), "rope_parameters is missing"),
    (lambda c: c["rope_parameters"].update(rope_theta=5.0), "rope_parameters.rope_theta differs"),
    (lambda c: c.pop("head_dim"), "head_dim is missing"),
    (lambda c: c.pop("rms_norm_eps"), "rms_norm_eps=None"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 3), "layer_types=.*full_attention for each"),
    (lambda c: c.update(architectures=["DSpark"]), r"architectures=\['DSpark'\]: expected one of"),
    (lambda c: c.pop("dflash_config"), "dflash_config is missing"),
    (lambda c: c.pop("dspine_config"), "dspine_config is missing"),
    (lambda c: c["dspine_config"].pop("excluded_ids"), "dspine_config lacks excluded_ids"),
    (lambda c: c["dspine_config"].update(excluded_ids=[-1]), r"dspine_config: excluded_ids=\[-1\]"),
    (lambda c: c["dspine_config"].update(valid_vocab_size=None), "dspine_config.valid_vocab_size is missing"),
    (lambda c: c["dspine_config"].update(valid_vocab_size=71), "valid_vocab_size=71 exceeds the 70 rows"),
    (lambda c: c["dspine_config"].update(surplus=1), "dspine_config.surplus=1: Extra inputs"),
    (lambda c: c["dspine_config"].update(ce_weight=2), "dspine_config.ce_weight=2: Input should be"),
    (lambda c: c.update(hidden_size=16), "is .*, the config says"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS, ids=[m for _, m in BAD_CONFIGS])
def test_reading_refuses_configs_by_key(
    exported: dict[str, Path], tmp_path: Path, layout: str, change: Change, message: str
) -> None:
    """vLLM#51655, sglang#34524: flags that an engine would replace by its own default."""
    with pytest.raises(CheckpointError, match=message):
        load_draft(damaged(exported[layout], tmp_path / "bad", config=change))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("sglang", lambda c: c["dflash_config"].pop(BRIDGE), f"dflash_config.{BRIDGE} is missing"),
        ("sglang", lambda c: c["dflash_config"].update({BRIDGE: True}), f"dflash_config.{BRIDGE} is missing"),
        (
            "sglang",
            lambda c: c["dflash_config"][BRIDGE].update(transfer_dim=13),
            f"{BRIDGE}.transfer_dim=13 contradicts dspine_config.transfer_rank=12",
        ),
        (
            "sglang",
            lambda c: c["dflash_config"][BRIDGE].pop("message_dim"),
            f"{BRIDGE}.message_dim=None contradicts dspine_config.message_size=8",
        ),
        ("specforge", lambda c: c["dflash_config"].update({BRIDGE: {}}), f"{BRIDGE} belongs to the sglang layout"),
    ],
    ids=["missing", "no section", "contradiction", "key missing", "wrong layout"],
)
def test_the_bridge_is_there_and_agrees(
    exported: dict[str, Path], tmp_path: Path, layout: str, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_draft(damaged(exported[layout], tmp_path / "bad", config=change))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"a": '])
def test_missing_and_torn_files_are_named(
    exported: dict[str, Path], tmp_path: Path, file: str, content: bytes | None
) -> None:
    folder = damaged(exported["sglang"], tmp_path / "bad")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises((CheckpointError, InvalidFileError), match=file):
        load_draft(folder)


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[m for _, m in BAD_TENSORS])
def test_writing_refuses_what_reading_refuses_and_keeps_an_earlier_export(
    state: dict[str, Tensor], tmp_path: Path, change: Change, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", state)
    out = tmp_path / "out"
    arguments = ["--run", str(tmp_path / "run"), "--to", "sglang", "--out", str(out)]
    assert main(arguments) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    tensors = {name: value.clone() for name, value in state.items()}
    change(tensors)
    save_state(tmp_path / "run" / "tiny-step3", tensors, 3)
    capsys.readouterr()
    assert main(arguments) == 2
    with pytest.raises(CheckpointError, match=message):
        export_run(tmp_path / "run", "sglang", out)
    assert capsys.readouterr().err.startswith("error: ")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(CheckpointError):
        export_run(tmp_path / "run", "specforge", tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_table_that_was_trained_in_bfloat16_is_not_cast_back(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_run(tmp_path / "run", state | {"transfer_codes": state["transfer_codes"].bfloat16()})
    with pytest.raises(CheckpointError, match=r"transfer_codes is torch\.bfloat16, and must be float32"):
        export_run(tmp_path / "run", "sglang", tmp_path / "out")


def test_a_table_that_lost_its_lower_bits_is_told_from_a_real_one() -> None:
    """At real ranks its rows still have norm 1."""
    table = torch.nn.functional.normalize(torch.randn(50, 1024, generator=torch.Generator().manual_seed(0)))
    check_table(table)
    with pytest.raises(CheckpointError, match="transfer_codes holds bfloat16 values in float32"):
        check_table(table.bfloat16().float())


def test_a_weight_that_overflows_the_exported_dtype_is_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_run(tmp_path / "run", state | {"norm.weight": torch.full_like(state["norm.weight"], 1e6)})
    with pytest.raises(CheckpointError, match=r"norm\.weight holds a value that is not finite"):
        export_run(tmp_path / "run", "sglang", tmp_path / "out", torch.float16)


def test_what_fails_after_writing_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that loses a bit: what was written is read back and compared before anything is replaced."""

    def lossy(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        tensors = {name: value.clone() for name, value in tensors.items()}
        tensors["norm.weight"][0] += 1
        save_file(tensors, path, metadata=metadata)

    export_run(run, "sglang", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(writer, "save_file", lossy)
    assert main(["--run", str(run), "--to", "sglang", "--out", str(tmp_path / "out")]) == 2
    assert "norm.weight differs after writing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_an_export_replaces_exports_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path, "holds 'file', which no export wrote"), (tmp_path / "file", "is a file; give a")):
        assert main(["--run", str(run), "--to", "sglang", "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    for _ in range(2):  # new, then over itself
        assert main(["--run", str(run), "--to", "specforge", "--out", str(tmp_path / "deep" / "out")]) == 0
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_the_recipes_dtype_is_the_default(state: dict[str, Tensor], run: Path, tmp_path: Path) -> None:
    save_run(tmp_path / "run", state, torch_dtype="float32")
    export_run(tmp_path / "run", "sglang", tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == "float32"
    assert torch.equal(load_draft(tmp_path / "out").tensors["fc.weight"], state["fc.weight"])
    assert main(["--run", str(run), "--to", "sglang", "--out", str(tmp_path / "half"), "--dtype", "float16"]) == 0
    assert load_draft(tmp_path / "half").tensors["fc.weight"].dtype is torch.float16


@pytest.mark.parametrize("missing", ["draft_config.json", "recipe.yaml", "tiny-step3", ""])
def test_folders_without_a_finished_run_are_refused(
    state: dict[str, Tensor], tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", state)
    path = tmp_path / "run" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["--run", str(tmp_path / "run"), "--to", "sglang", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'run'}") and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_torn_checkpoints_are_refused(
    state: dict[str, Tensor], tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", state)
    path = tmp_path / "run" / "tiny-step3" / "training_state.pt"
    if content is None:
        torch.save({"strategy": "other"}, path)
    else:
        path.write_bytes(content)
    assert main(["--run", str(tmp_path / "run"), "--to", "sglang", "--out", str(tmp_path / "out")]) == 2
    assert "not a run with a complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to", "sglang", "--out", "x"],
        ["--run", "a", "--draft", "b", "--to", "sglang", "--out", "x"],
        ["--run", "a", "--to", "vllm", "--out", "x"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_layout_table_is_the_one_place_to_correct(
    run: Path, tmp_path: Path, state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the released format turn out otherwise: other bridge keys, the table in a file of its own."""
    other = Layout("DFlashDraftModel", {"rank": "transfer_rank"}, table=("bridge.safetensors", "codes"))
    monkeypatch.setitem(formats.LAYOUTS, "sglang", other)
    export_run(run, "sglang", tmp_path / "out")
    assert config_of(tmp_path / "out")["dflash_config"][BRIDGE] == {"rank": 12}
    assert load_file(tmp_path / "out" / "bridge.safetensors").keys() == {"codes"}
    assert "transfer_codes" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(load_draft(tmp_path / "out").tensors["transfer_codes"], state["transfer_codes"])
    (tmp_path / "out" / "bridge.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"bridge\.safetensors"):
        load_draft(tmp_path / "out")


SGLANG_READS = """
import json, socket, sys
import torch
from safetensors.torch import load_file
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from transformers import AutoConfig

config = AutoConfig.from_pretrained(sys.argv[1])
parsed = parse_dflash_draft_config(draft_hf_config=config)
set_global_server_args_for_scheduler(ServerArgs(model_path="none", device="cpu"))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
initialize_model_parallel()
model = DFlashDraftModel(config)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
weights = load_file(sys.argv[1] + "/model.safetensors")
model.load_weights({name: value.float() for name, value in weights.items()}.items())
qkv = [weights[f"layers.1.self_attn.{k}_proj.weight"].float() for k in "qkv"]
print(json.dumps({
    "architectures": config.architectures,
    "parsed": vars(parsed),
    "ids": parsed.resolve_target_layer_ids(target_num_layers=6),
    "theta": get_rope_config(config)[0],
    "block_size": model.block_size,
    "not loaded": [name for name, p in model.named_parameters() if p.isnan().any()],
    "same": torch.equal(model.layers[1].self_attn.qkv_proj.weight, torch.cat(qkv)),
    "is_causal": config.is_causal,
}))
"""


def test_sglang_reads_the_backbone_as_we_mean_it(exported: dict[str, Path]) -> None:
    """Its own DFlash loader, which skips names that it does not know: none of the backbone's is skipped."""
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_READS, str(exported["sglang"])],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    parsed = read.pop("parsed")
    assert {name: parsed[name] for name in ("num_hidden_layers", "num_target_layers", "block_size")} == {
        "num_hidden_layers": 3,
        "num_target_layers": 6,
        "block_size": 5,
    }
    assert parsed["mask_token_id"] == MASK_ID and parsed["target_layer_ids"] == list(range(TAPS))
    assert read == {
        "architectures": ["DFlashDraftModel"],
        "ids": list(range(TAPS)),
        "theta": 10000.0,
        "block_size": 5,
        "not loaded": [],
        "same": True,
        "is_causal": True,
    }
