"""Plans: steps and schedules from data, batch and ranks; what cannot run is refused; sizes on the meta device."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from specforge.training.assembly import build_model_bundle

from specforge_dspine.formats.reader import load_draft
from specforge_dspine.formats.writer import write_checkpoint
from specforge_dspine.modeling.draft_config import small_draft_config
from specforge_dspine.modeling.draft_model import DSpineDraftModel, meta_draft
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.modeling.state_dict import READY, TABLE
from specforge_dspine.training import plan as planning
from specforge_dspine.training.plan import make_plan
from specforge_dspine.training.plan_parts import FeaturePlan, Plan, StreamPlan
from specforge_dspine.training.recipe import check_recipe
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import model_fingerprint
from tests.support.features import write_features
from tests.support.small import save_tokenizer, tiny_recipe, write_samples
from tests.support.targets import build_llama, build_qwen3

LAYERS = [0, 2, 4]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny targets, 24 samples, and 10 feature files of them."""
    root = tmp_path_factory.mktemp("plans")
    save_tokenizer(build_qwen3(root / "target"))
    save_tokenizer(build_llama(root / "llama"))
    write_samples(root / "samples.jsonl", 24)
    write_samples(root / "few.jsonl", 10)
    write_features(root / "target", root / "few.jsonl", root / "features", LAYERS)
    return root


def resolve(toy: Path, *, offline: bool = False, ranks: int = 1, **sections: dict[str, Any]) -> Plan:
    """The plan of a tiny recipe; ``sections`` change what it says; a value of None takes a key out."""
    data = {"hidden_states_path": str(toy / "features")} if offline else {"prompts_path": str(toy / "samples.jsonl")}
    document = tiny_recipe(
        toy / "target",
        toy / "run",
        data=data,
        stream={"servers": ["http://127.0.0.1:1"]},
        runtime={"in_flight_low_watermark": 64, "in_flight_high_watermark": 128},
    )
    for section, values in sections.items():
        document[section] = {k: v for k, v in (document.get(section, {}) | values).items() if v is not None}
    return make_plan(check_recipe(document, world_size=ranks), ranks=ranks)


def refusal(toy: Path, **sections: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        resolve(toy, **sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "training", "quantum", "steps", "remainder", "beyond"),
    [
        (1, {}, 2, 12, 0, 0),
        (1, {"batch_size": 5}, 5, 4, 4, 0),
        (1, {"accumulation_steps": 3, "num_epochs": 2}, 6, 8, 0, 0),
        (3, {"accumulation_steps": 2}, 12, 2, 0, 0),
        (7, {"num_epochs": 3}, 14, 5, 2, 0),
        (1, {"max_steps": 5}, 2, 5, 0, 14),
        (1, {"batch_size": 5, "max_steps": 3}, 5, 3, 4, 5),
    ],
)
def test_streamed_steps(
    toy: Path, ranks: int, training: dict[str, Any], quantum: int, steps: int, remainder: int, beyond: int
) -> None:
    """A step takes ranks × batch × accumulation samples; epochs run on without a break."""
    plan = resolve(toy, ranks=ranks, training={"max_steps": None} | training)
    schedule = plan.schedule
    assert (schedule.samples_per_step, schedule.steps, schedule.total_steps) == (quantum, steps, steps)
    assert (schedule.remainder, schedule.beyond_max_steps) == (remainder, beyond)
    assert isinstance(plan.source, StreamPlan) and len(plan.source.samples) == schedule.samples == 24


@pytest.mark.parametrize(
    ("ranks", "training", "steps", "beyond"),
    [
        (1, {}, 5, 0),
        (1, {"batch_size": 5, "num_epochs": 3}, 6, 0),
        (1, {"batch_size": 5, "num_epochs": 2, "accumulation_steps": 2}, 2, 0),
        (5, {}, 1, 0),
        (1, {"max_steps": 2}, 2, 6),
    ],
)
def test_offline_steps(toy: Path, ranks: int, training: dict[str, Any], steps: int, beyond: int) -> None:
    plan = resolve(toy, offline=True, ranks=ranks, training={"max_steps": None} | training)
    schedule = plan.schedule
    assert (schedule.steps, schedule.total_steps) == (steps, steps)
    assert (schedule.remainder, schedule.beyond_max_steps) == (0, beyond)
    assert isinstance(plan.source, FeaturePlan) and len(plan.source.files) == schedule.samples == 10
    assert f"offline features in {toy / 'features'}" in plan.render()


@pytest.mark.parametrize(
    ("ranks", "training", "message"),
    [
        (1, {"batch_size": 3}, "of 10 feature files 1 would fill no batch"),
        (2, {"batch_size": 2}, "of 10 feature files 2 would fill no batch"),
        (4, {"batch_size": 3}, "of 10 feature files 10 would fill no batch"),
        (1, {"accumulation_steps": 2}, "incomplete gradient accumulation: 5 micro-batches"),
    ],
)
def test_an_offline_plan_that_does_not_divide_is_refused(
    toy: Path, ranks: int, training: dict[str, Any], message: str
) -> None:
    """No sample is dropped or repeated silently."""
    with pytest.raises(RecipeError, match=message):
        resolve(toy, offline=True, ranks=ranks, training={"max_steps": None} | training)


def test_schedules_follow_the_horizon(toy: Path) -> None:
    plan = resolve(toy, training={"max_steps": 6, "total_steps": 120, "warmup_ratio": 0.04})
    assert (plan.schedule.steps, plan.schedule.total_steps, plan.schedule.warmup_steps) == (6, 120, 4)
    text = plan.render()
    assert "6 steps of 120; lr 0.001, warm-up 4 steps, then cosine" in text
    assert "p = 0.5 until step 20, 0 from step 40, in layer 1 of 2" in text
    assert "β = 0.5 after 4 steps" in text
    assert plan.draft_config.dspine_config["alignment_warmup_steps"] == 4
    given = resolve(toy, dspine={"alignment_warmup_steps": 146})
    assert "β = 0.5 after 146 steps" in given.render()
    assert given.draft_config.dspine_config["alignment_warmup_steps"] == 146


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"max_steps": 13}},
            "training.max_steps=13 needs 26 samples; data × epochs give 12 steps: raise",
        ),
        ({"training": {"total_steps": 3}}, "training.total_steps=3 is below the 4 steps of this run"),
        (
            {"training": {"batch_size": 25}},
            "no optimizer step: 24 samples × 1 epochs, and one step takes 25; add data",
        ),
        (
            {"runtime": {"in_flight_low_watermark": 1}},
            "runtime.in_flight_low_watermark=1 is below one optimizer step of 2 samples; set it to at least 2",
        ),
        (
            {"offline": True, "training": {"max_steps": None, "accumulation_steps": 2}},
            "5 micro-batches across 1 epoch(s) is not divisible by accumulation_steps=2 (remainder=1); adjust "
            "batch/accumulation/epochs or set max_steps <= 2",
        ),
        ({"training": {"attention_backend": "fa"}}, "attention_backend='fa'; supported: ['eager', 'flex_attention'"),
    ],
)
def test_what_cannot_run_is_refused_with_what_would(toy: Path, sections: dict[str, Any], message: str) -> None:
    assert message in refusal(toy, **sections)


@pytest.mark.parametrize("key", ["target_model_path", "draft_checkpoint_path", "draft_model_config"])
@pytest.mark.parametrize("path", ["models/none", "./none", "models/deep/none", "nowhere/deep/none"])
def test_a_missing_model_folder_is_named_in_full(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str
) -> None:
    """No such name can be on the hub: it is not asked, and the message says where a relative path starts."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    message = refusal(toy, model={key: path})
    assert message.startswith(f"model.{key}={path!r}: no such folder (looked in {tmp_path / path}: relative paths")
    assert "start at the current folder); give one that holds a model, or a model's name on the hub" in message


@pytest.mark.parametrize("path", ["none", "nobody/none"])
def test_a_name_that_the_hub_does_not_know_may_have_meant_a_folder(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(toy, model={"target_model_path": path})
    assert f"model.target_model_path={path!r} (looked in {tmp_path / path}: relative paths start at" in message


def test_missing_data_is_named_in_full(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = f"(looked in {tmp_path / 'none'}: relative paths start at the current folder)"
    assert f"data.prompts_path='none': no such file {where}" in refusal(toy, data={"prompts_path": "none"})
    for section in ("data", "heldout"):
        values = {"hidden_states_path": "none"} | ({"interval": 1} if section == "heldout" else {})
        expected = f"{section}.hidden_states_path='none' holds no .ckpt files {where}"
        assert expected in refusal(toy, **{section: values})


def test_two_ranks_need_twice_the_samples_in_flight(toy: Path) -> None:
    runtime = {"in_flight_low_watermark": 4}
    assert resolve(toy, runtime=runtime).schedule.samples_per_step == 2
    assert "is below one optimizer step of 6 samples" in refusal(toy, ranks=3, runtime=runtime)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"attention_backend": "flex_attention"}, "'flex_attention' has no CPU backward; use sdpa"),
        ({"fsdp_sharding": "SHARD_GRAD_OP"}, "'SHARD_GRAD_OP' needs an accelerator; use NO_SHARD"),
    ],
)
def test_defaults_of_specforge_that_no_cpu_has_are_refused(
    toy: Path, training: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(toy, training=training)
    monkeypatch.setattr(planning, "get_device_type", lambda: "cuda")
    assert resolve(toy, training=training).schedule.steps == 4  # nothing else is in the way


def test_the_draft_takes_its_shape_from_target_and_recipe(toy: Path) -> None:
    config = resolve(toy, model={"target_model_path": str(toy / "llama")}).draft_config
    assert config.architectures == ["DSpineDraftModel"] and config.model_type == "qwen3"
    assert (config.hidden_size, config.head_dim) == (64, 16)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.num_hidden_layers, config.num_target_layers, config.block_size) == (2, 6, 4)
    assert config.layer_types == ["full_attention"] * 2 and config.is_causal is True
    assert config.tie_word_embeddings is False and config.hidden_act == "silu"
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.dflash_config == {"mask_token_id": 250, "target_layer_ids": LAYERS, "block_size": 4, "causal": True}
    assert config.dspine_config["excluded_ids"] == [250] and config.dspine_config["valid_vocab_size"] == 250


@pytest.mark.parametrize(
    ("rope", "kept"),
    [
        ({"rope_type": None}, {"rope_type": "default"}),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default"}),
        ({"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}, {"rope_type": "default"}),
        (
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_the_draft_rotates_whole_heads_whatever_its_target_does(
    toy: Path, tmp_path: Path, rope: dict[str, Any], kept: dict[str, Any]
) -> None:
    shutil.copytree(toy / "target", tmp_path / "target")
    document = json.loads((tmp_path / "target" / "config.json").read_text())
    document |= {"rope_parameters": rope | {"rope_theta": 5e5}, "rope_scaling": None}
    (tmp_path / "target" / "config.json").write_text(json.dumps(document))
    config = resolve(toy, model={"target_model_path": str(tmp_path / "target")}).draft_config
    assert config.rope_parameters == kept | {"rope_theta": 5e5}
    assert not hasattr(config, "partial_rotary_factor") and not hasattr(config, "mrope_section")
    states = DSpineDraftModel(config).rotary_emb(torch.zeros(1, 3, 64), torch.arange(3)[None])
    assert states[0].shape == (1, 3, config.head_dim)


def test_ids_that_the_recipe_excludes_join_the_mask(toy: Path) -> None:
    config = resolve(toy, dspine={"excluded_ids": [9, 7], "valid_vocab_size": 249}).draft_config
    assert config.dspine_config["excluded_ids"] == [7, 9, 250]
    assert config.dspine_config["valid_vocab_size"] == 249


@pytest.fixture(scope="module")
def manifest(toy: Path) -> dict[str, Any]:
    """What ``specforge_dspine.capture`` would have written beside the features."""
    target = dataclasses.asdict(resolve(toy, offline=True).target)
    return {"complete": True, "inputs": target | {"model_fingerprint": model_fingerprint(toy / "target")}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"model_path": "/moved/elsewhere"}, None),
        ({"layers": [0, 2, 3]}, "layers: there [0, 2, 3], here [0, 2, 4]"),
        ({"dtype": "bfloat16"}, "dtype: there 'bfloat16', here 'float32'"),
        ({"num_layers": 8}, "num_layers: there 8, here 6"),
        ({"model_fingerprint": "0" * 64}, "model_fingerprint: there '000000"),
    ],
)
def test_features_of_another_target_are_refused(
    toy: Path, manifest: dict[str, Any], change: dict[str, Any], message: str | None
) -> None:
    path = toy / "features" / "manifest.json"
    path.write_text(json.dumps(manifest | {"inputs": manifest["inputs"] | change}))
    try:
        if message is None:
            assert resolve(toy, offline=True).schedule.steps == 4
        else:
            assert message in refusal(toy, offline=True)
    finally:
        path.unlink()


def test_an_unfinished_capture_is_refused(toy: Path, manifest: dict[str, Any]) -> None:
    path = toy / "features" / "manifest.json"
    path.write_text(json.dumps(manifest | {"complete": False}))
    try:
        assert "the capture was not finished; run the same command again" in refusal(toy, offline=True)
    finally:
        path.unlink()


@pytest.fixture(scope="module")
def checkpoint(toy: Path) -> Path:
    """An exported draft for the tiny target, to start from; its training settings are not the recipe's."""
    plan = resolve(toy, dspine={"ce_weight": 0.7})
    draft = DSpineDraftModel(plan.draft_config)
    tensors = dict(draft.state_dict()) | {READY: torch.tensor(True)}
    tensors[TABLE] = torch.nn.functional.normalize(torch.randn(256, 16))
    write_checkpoint(tensors, plan.draft_config, "specforge", toy / "start", torch.float32)
    return toy / "start"


def test_a_warm_start_keeps_the_drafts_shape_and_takes_the_recipes_settings(toy: Path, checkpoint: Path) -> None:
    plan = resolve(toy, model={"draft_checkpoint_path": str(checkpoint)})
    assert plan.draft_config.dspine_config["ce_weight"] == 0.1
    assert plan.draft_config.dspine_config["excluded_ids"] == [250]


def test_a_warm_start_loads_the_drafts_weights_and_its_own_table(toy: Path, checkpoint: Path) -> None:
    plan = resolve(toy, model={"draft_checkpoint_path": str(checkpoint)})
    draft = build_model_bundle(plan.specforge_config, algorithm=plan.algorithm).draft_model
    saved = load_draft(checkpoint).tensors
    assert all(torch.equal(value, saved[name]) for name, value in draft.state_dict().items())
    assert draft.settings.ce_weight == 0.1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dspine": {"block_size": 5}}, "dspine.block_size=5: the draft to start from has 4; give that"),
        ({"dspine": {"num_hidden_layers": 3}}, "dspine.num_hidden_layers=3: the draft to start from has 2"),
        (
            {"dspine": {"target_layer_ids": [0, 2, 3]}},
            "dspine.target_layer_ids=[0, 2, 3]: the draft to start from has",
        ),
        ({"dspine": {"transfer_rank": 8}}, "dspine.transfer_rank=8: the draft to start from has 16"),
        ({"dspine": {"message_size": 4}}, "dspine.message_size=4: the draft to start from has 8"),
        ({"model": {"mask_token_id": 251}}, "model.mask_token_id=251: the draft to start from was trained with 250"),
    ],
)
def test_a_warm_start_that_contradicts_the_recipe_is_refused(
    toy: Path, checkpoint: Path, sections: dict[str, Any], message: str
) -> None:
    sections.setdefault("model", {})["draft_checkpoint_path"] = str(checkpoint)
    assert message in refusal(toy, **sections)


def test_a_warm_start_of_another_target_is_refused(toy: Path, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    message = refusal(toy, model={"draft_checkpoint_path": str(tmp_path)})
    assert "the draft to start from has hidden_size=32, the target 64" in message


def test_sizes_of_qwen3_8b_without_its_memory() -> None:
    """Five layers over H = 4096 with r = 1024, a = 512: the paper's "about 33M", in the released names."""
    config = small_draft_config(
        vocab_size=151936,
        hidden_size=4096,
        layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        theta=1e6,
        block_size=16,
        target_layer_ids=[1, 9, 17, 25, 33],
        num_target_layers=36,
        mask_token_id=151669,
        settings=DSpineSettings(transfer_rank=1024, message_size=512, replacement_layers=3),
    )
    draft = meta_draft(config)
    assert draft.num_injection_parameters() == 33_030_656
    shapes = {name: tuple(value.shape) for name, value in draft.state_dict().items()}
    assert all(value.is_meta for value in draft.state_dict().values())
    backbone = {
        "fc.weight": (4096, 20480),
        "hidden_norm.weight": (4096,),
        "norm.weight": (4096,),
    }
    injection = {
        "injection.message.weight": (512, 1024),
        "injection.receiver_gate.weight": (512, 1024),
        "injection.predecessor_gate.weight": (512, 1024),
        "injection.bias": (512,),
        "transfer_codes": (151936, 1024),
        "transfer_ready": (),
    }
    for i in range(5):
        layer = f"layers.{i}."
        backbone |= {
            layer + "input_layernorm.weight": (4096,),
            layer + "post_attention_layernorm.weight": (4096,),
            layer + "self_attn.q_proj.weight": (4096, 4096),
            layer + "self_attn.k_proj.weight": (1024, 4096),
            layer + "self_attn.v_proj.weight": (1024, 4096),
            layer + "self_attn.o_proj.weight": (4096, 4096),
            layer + "self_attn.q_norm.weight": (128,),
            layer + "self_attn.k_norm.weight": (128,),
            layer + "mlp.gate_proj.weight": (12288, 4096),
            layer + "mlp.up_proj.weight": (12288, 4096),
            layer + "mlp.down_proj.weight": (4096, 12288),
        }
        injection |= {
            f"injection.readouts.{i}.weight": (1024, 4096),
            f"injection.writes.{i}.weight": (4096, 512),
        }
    assert len(backbone) == 58
    assert shapes == backbone | injection
    assert draft.transfer_codes.dtype is torch.float32
