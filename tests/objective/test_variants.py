"""Variants of the method as one-line overrides: each trains every parameter that it has, and has no other."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel

from specforge_dspine.formats.reader import load_draft
from specforge_dspine.formats.writer import write_checkpoint
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.alignment_gate import alignment_beta
from specforge_dspine.objective.curriculum import replacement_probability
from specforge_dspine.objective.supervision import supervised_positions
from specforge_dspine.training.plan import make_plan
from specforge_dspine.training.recipe import apply_override, check_recipe
from specforge_dspine.utils.errors import CheckpointError, RecipeError
from tests.support.drafts import HIDDEN, expected_shapes, make_batch, make_blocks, make_model
from tests.support.small import save_tokenizer, tiny_recipe

ANCHORS = [[4, 6, 11], [5, 13]]
DFLASH: dict[str, Any] = {"injection": False, "alignment": "off", "causal": False, "ce_weight": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "dspine": {},
    "no injection": {"injection": False},
    "no injection, no alignment": {"injection": False, "alignment": "off"},
    "no injection, token CE": {"injection": False, "alignment": "ce"},
    "no refinement": {"refinement": False},
    "token CE": {"alignment": "ce"},
    "no alignment": {"alignment": "off"},
    "DFlash": DFLASH,
}


def loss_of(options: dict[str, Any], **batch: Any) -> tuple[Any, Any]:
    model = make_model(**options)
    return model, model(**(make_batch() | batch), blocks=make_blocks(ANCHORS), beta=0.3)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_is_used(name: str) -> None:
    model, loss = loss_of(VARIANTS[name])
    loss.numerator.backward()
    for parameter_name, parameter in model.draft_model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), parameter_name
    shapes = {n: tuple(v.shape) for n, v in model.draft_model.state_dict().items()}
    assert shapes == expected_shapes(model.draft_model.config)


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_and_the_parts_of_a_variant(name: str) -> None:
    options = VARIANTS[name]
    model, loss = loss_of(options)
    model.objective_chunk_blocks = 0
    whole = model(**make_batch(), blocks=make_blocks(ANCHORS), beta=0.3)
    assert torch.allclose(loss.numerator, whole.numerator, rtol=1e-12)
    settings = model.draft_model.settings
    assert ("refined_ce" in loss.parts) == ("coverage" in loss.parts) == settings.refinement
    assert ("align" in loss.parts) == ("lambda" in loss.parts) == (settings.alignment != "off")
    assert ("l1" in loss.parts) == (settings.ce_weight < 1)
    assert all(math.isfinite(float(value.sum())) for pair in loss.parts.values() for value in pair)


def test_dflash_is_cross_entropy_over_bidirectional_blocks() -> None:
    model, loss = loss_of(DFLASH)
    assert loss.parts.keys() == {"ce", "rows", "accuracy", "accuracy_at", "tau"}
    assert torch.allclose(loss.numerator, loss.parts["ce"][0], rtol=1e-12)
    assert not any(name.startswith(("injection", "transfer")) for name in model.draft_model.state_dict())
    batch, blocks = make_batch(), make_blocks([[4]])
    batch = {k: v[:1] for k, v in batch.items()}
    before = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks).hidden
    with torch.no_grad():
        model.embed_tokens.weight[model.draft_model.mask_token_id] += 1.0
    after = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks).hidden
    assert not torch.allclose(before[0, 0, 0], after[0, 0, 0]), "the anchor's slot sees the slots after it"


def test_the_baseline_is_specforges_own_dflash() -> None:
    """The same loss and gradients as ``OnlineDFlashModel`` on the same weights and anchors. Where a mask has a hole
    they differ on purpose: theirs goes on after it, ours is the contiguous prefix."""
    ours = make_model(**DFLASH)
    config = copy.deepcopy(ours.draft_model.config)
    config.dflash_config = config.dflash_config | {"attention_mode": "gqa"}
    draft = DFlashDraftModel(config).double()
    draft.load_state_dict(ours.draft_model.state_dict())
    theirs = OnlineDFlashModel(
        draft,
        ours.lm_head,
        ours.embed_tokens,
        mask_token_id=ours.draft_model.mask_token_id,
        block_size=int(ours.draft_model.block_size),
        attention_backend="sdpa",
        num_anchors=4,
        loss_decay_gamma=7.0,
        objective_chunk_blocks=1,
    )
    batch, blocks = make_batch(), make_blocks(ANCHORS)
    theirs._sample_anchor_positions = lambda *_: (blocks.anchors, blocks.keep)
    _, _, metrics = theirs(batch["input_ids"], batch["hidden_states"], batch["loss_mask"])
    numerator, denominator = metrics["loss_terms"]
    loss = ours(**batch, blocks=blocks, beta=0.3)
    assert torch.allclose(loss.numerator, numerator.double(), rtol=1e-6)
    assert torch.allclose(loss.denominator, denominator.double(), rtol=1e-6)
    assert loss.parts["accuracy"][0] == metrics["ratio_metrics"]["acc"][0]
    loss.numerator.backward()
    numerator.backward()
    for (name, mine), other in zip(ours.draft_model.named_parameters(), draft.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-8), name


def test_a_causal_block_does_not_look_ahead() -> None:
    model = make_model()
    batch, blocks = {k: v[:1] for k, v in make_batch().items()}, make_blocks([[4]])
    before = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks).hidden
    with torch.no_grad():
        model.embed_tokens.weight[model.draft_model.mask_token_id] += 1.0
    after = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks).hidden
    assert torch.equal(before[0, 0, 0], after[0, 0, 0]) and not torch.allclose(before[0, 0, 1], after[0, 0, 1])


def test_token_ce_alignment_is_the_heads_cross_entropy_of_every_layer() -> None:
    """−log softmax(E · norm(h_ℓ))_y, with the positions' weights; the last layer's is the backbone's own CE."""
    model, loss = loss_of({"alignment": "ce"})
    batch, blocks = make_batch(), make_blocks(ANCHORS)
    output = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks, with_features=True)
    positions = supervised_positions(batch["input_ids"], batch["loss_mask"], blocks, 5, 7.0)
    assert output.features.shape == (3, 2, 3, 5, HIDDEN)
    states = output.features[:, positions.sequence, positions.block, positions.slot]
    losses = [F.cross_entropy(s @ model.lm_head.weight.T, positions.label, reduction="none") for s in states]
    by_hand = torch.stack([(positions.weight * each).sum() for each in losses])
    align, weight = loss.parts["align"]
    assert torch.allclose(align, by_hand) and torch.allclose(weight, positions.weight.sum().expand(3).double())
    assert torch.allclose(align[-1], loss.parts["ce"][0])


def test_without_refinement_the_loss_is_the_backbones_and_the_alignment() -> None:
    _, loss = loss_of({"refinement": False, "alignment": "off"})
    backbone = 0.1 * loss.parts["ce"][0] + 0.9 * loss.parts["l1"][0]
    assert torch.allclose(loss.numerator.detach(), backbone)


def test_curriculum_off_replaces_nothing() -> None:
    sizes = {"transfer_rank": 4, "message_size": 2, "replacement_layers": 1}
    assert replacement_probability(0, 100, DSpineSettings(**sizes)) == 0.5
    assert replacement_probability(0, 100, DSpineSettings(**sizes, curriculum=False)) == 0.0
    assert alignment_beta(50, 0, DSpineSettings(**sizes, alignment="off")) == 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target_dirs: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("variants")
    save_tokenizer(target_dirs["qwen3"])
    (root / "features").mkdir()
    for index in range(16):
        torch.save({}, root / "features" / f"{index:02d}.ckpt")
    return root


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], {"method": "block-causal, injection, refinement, α = 0.1; separate weights per microbatch"}),
        (
            ["dspine.injection=off"],
            {"method": "block-causal, α = 0.1; separate weights per microbatch", "curriculum": "off"},
        ),
        (["dspine.refinement=off"], {"method": "block-causal, injection, α = 0.1; separate weights per microbatch"}),
        (["dspine.alignment=off"], {"alignment": "off"}),
        (["dspine.alignment=ce"], {"alignment": "token CE, β = 0.5 after 1 steps, times the backbone's CE"}),
        (["dspine.curriculum=off"], {"curriculum": "off"}),
        (
            ["dspine.normalization_scope=window", "dspine.normalization=shared"],
            {"method": "block-causal, injection, refinement, α = 0.1; shared weights per window"},
        ),
        (
            [f"dspine.{key}={str(value).lower()}" for key, value in DFLASH.items()],
            {"method": "bidirectional blocks, α = 1; separate weights per microbatch", "alignment": "off"},
        ),
    ],
)
def test_variants_are_one_line_overrides(
    folder: Path, target_dirs: dict[str, Path], overrides: list[str], lines: dict[str, str]
) -> None:
    document = tiny_recipe(
        target_dirs["qwen3"], folder / "run", data={"hidden_states_path": str(folder / "features")}
    )
    for override in overrides:
        apply_override(document, override)
    recipe = check_recipe(document)
    assert check_recipe(recipe.resolved()) == recipe
    plan = dict(line.split(maxsplit=1) for line in make_plan(recipe, ranks=1).render().splitlines())
    assert {name: plan[name] for name in lines} == lines


def test_refinement_without_injection_is_refused_with_its_section(folder: Path, target_dirs: dict[str, Path]) -> None:
    document = tiny_recipe(
        target_dirs["qwen3"], folder / "run", data={"hidden_states_path": str(folder / "features")}
    )
    for override in ("dspine.injection=off", "dspine.refinement=on"):
        apply_override(document, override)
    with pytest.raises(RecipeError, match="dspine: refinement redoes the last layer's injection"):
        check_recipe(document)


def exported(name: str, layout: str, out: Path) -> Any:
    draft = make_model(dtype=torch.float32, **VARIANTS[name]).draft_model
    config = draft.config
    config.dspine_config = draft.settings.model_dump(mode="json") | {"excluded_ids": [63], "valid_vocab_size": 70}
    write_checkpoint(draft.state_dict(), config, layout, out, torch.float32)
    return draft


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_survive_the_round_trip(name: str, tmp_path: Path) -> None:
    draft = exported(name, "specforge", tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft").to_model()
    assert loaded.settings.model_dump(exclude={"excluded_ids", "valid_vocab_size"}) == draft.settings.model_dump(
        exclude={"excluded_ids", "valid_vocab_size"}
    )
    assert all(torch.equal(value, draft.state_dict()[key]) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["no injection", "DFlash"])
def test_a_draft_without_injection_is_served_as_plain_dflash(name: str, tmp_path: Path) -> None:
    """No bridge, no readouts, no table: nothing that a DFlash loader would not know."""
    draft = exported(name, "sglang", tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft").to_model()
    assert loaded.injection is None and "selected_prefix_code_bridge" not in loaded.config.dflash_config
    assert loaded.config.is_causal is (name != "DFlash")
    assert not any(key.startswith(("injection", "transfer")) for key in loaded.state_dict())
    assert torch.equal(loaded.fc.weight, draft.fc.weight)


def test_injection_without_refinement_cannot_be_served_as_dspine(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"refinement is off in this draft.*export it as specforge"):
        exported("no refinement", "sglang", tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
