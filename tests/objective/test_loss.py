"""The loss: which positions count, reductions, empty cases, where gradients flow, bounded memory."""

from __future__ import annotations

import math

import pytest
import torch

from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.objective.distillation import Supervision, distill, distill_by_autograd
from specforge_dspine.objective.supervision import supervised_positions
from tests.support.drafts import make_batch, make_blocks, make_model

ANCHORS = [[4, 6, 11], [5, 17]]


def positions_of(mask: list[int], anchors: list[int], block: int, gamma: float | None = 7.0):  # type: ignore[no-untyped-def]
    ids = torch.arange(100, 100 + len(mask))[None]
    return supervised_positions(ids, torch.tensor([mask]), make_blocks([anchors]), block, gamma)


def test_contiguous_supervised_prefix() -> None:
    """SpecForge#472, speculators#865: mask 1 on 8..39, anchor 37: slots 1 and 2 alone are supervised."""
    mask = [1 if 8 <= i < 40 else 0 for i in range(64)]
    positions = positions_of(mask, [37], 16)
    assert positions.slot.tolist() == [1, 2] and positions.label.tolist() == [138, 139]
    assert positions.predecessor.tolist() == [137, 138] and positions.predecessor_position.tolist() == [37, 38]


def test_a_gap_ends_the_block() -> None:
    positions = positions_of([1, 1, 1, 0, 1, 1, 1, 1], [0], 6)
    assert positions.slot.tolist() == [1, 2]


def test_a_block_may_run_past_the_end() -> None:
    positions = positions_of([1] * 6, [3], 8)
    assert positions.label.tolist() == [104, 105]


def test_weights_decay_from_slot_one() -> None:
    positions = positions_of([1] * 9, [0], 5)
    assert positions.weight.tolist() == pytest.approx([math.exp(-t / 7) for t in range(4)])
    assert positions_of([1] * 9, [0], 5, None).weight.tolist() == [1, 1, 1, 1]


def forward(model, batch, blocks, beta=0.3):  # type: ignore[no-untyped-def]
    return model(**batch, blocks=blocks, beta=beta)


def test_chunks_change_nothing() -> None:
    model, batch, blocks = make_model(), make_batch(), make_blocks(ANCHORS)
    reference = None
    for chunk in (0, 1, 2, 5, 100):
        model.objective_chunk_blocks = chunk
        model.zero_grad()
        loss = forward(model, batch, blocks)
        loss.numerator.backward()
        gradients = {n: p.grad.clone() for n, p in model.draft_model.named_parameters()}
        if reference is None:
            reference = loss, gradients
            continue
        assert torch.allclose(loss.numerator, reference[0].numerator, rtol=1e-12)
        assert loss.denominator == reference[0].denominator
        for name, value in gradients.items():
            assert torch.allclose(value, reference[1][name], atol=1e-10), name
        for name, (top, bottom) in loss.parts.items():
            assert torch.allclose(top, reference[0].parts[name][0]), name
            assert torch.allclose(bottom, reference[0].parts[name][1]), name


@pytest.mark.parametrize("normalization", ["separate", "shared"])
def test_empty_coverage_and_mass_contribute_zero(normalization: str) -> None:
    model, batch, blocks = make_model(candidate_mass_threshold=1.0), make_batch(), make_blocks(ANCHORS)
    model.normalization = normalization
    positions = supervised_positions(batch["input_ids"], batch["loss_mask"], blocks, 5, 7.0)
    wrong = torch.stack([torch.arange(6) + (label >= 6) * 0 + (label < 6) * 6 for label in positions.label])
    loss = model(**batch, blocks=blocks, beta=0.3, candidates=wrong)
    assert loss.denominator > 0 and loss.parts["coverage"][0] == 0 and loss.parts["refined_ce"] == (0, 0)
    assert loss.parts["heavy"][0] == 0 and loss.parts["refined_l1"] == (0, 0)
    backbone = 0.1 * loss.parts["ce"][0] + 0.9 * loss.parts["l1"][0]
    align = 0.3 * loss.parts["ce"][0] / loss.denominator * loss.parts["align"][0].sum()
    assert torch.allclose(loss.numerator, backbone + align)
    loss.numerator.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.draft_model.parameters())


def test_no_supervised_position_gives_zero_and_a_gradient_for_every_weight() -> None:
    """DDP hangs on a parameter without gradient, and a rank may well get an unsupervised batch."""
    model, batch = make_model(), make_batch()
    batch["loss_mask"][:] = 0
    blocks = Blocks(*(torch.zeros(2, 1, dtype=kind) for kind in (torch.long, torch.bool, torch.bool)))
    loss = forward(model, batch, blocks)
    assert loss.numerator == 0 and loss.denominator == 0
    loss.numerator.backward()
    for name, parameter in model.draft_model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert loss.parts["rows"][0] == 0 and loss.parts["tau"][1] == 0


def test_numerators_and_weights_add_up_over_sequences() -> None:
    """Σnum/Σden, never a mean of means: the shared objective of two sequences is the sum of each alone."""
    model, batch = make_model(), make_batch()
    model.normalization = "shared"
    together = forward(model, batch, make_blocks(ANCHORS), beta=0.0)
    parts = [
        forward(model, {k: v[i : i + 1] for k, v in batch.items()}, make_blocks([ANCHORS[i]]), beta=0.0)
        for i in range(2)
    ]
    assert torch.allclose(together.numerator, parts[0].numerator + parts[1].numerator)
    assert torch.allclose(together.denominator, parts[0].denominator + parts[1].denominator)


def test_frozen_tables_get_no_gradient_and_the_gate_none() -> None:
    model, batch, blocks = make_model(), make_batch(), make_blocks(ANCHORS)
    batch["target_last_hidden_states"].requires_grad_()
    batch["hidden_states"].requires_grad_()
    loss = forward(model, batch, blocks)
    loss.numerator.backward()
    assert model.lm_head.weight.grad is None and model.embed_tokens.weight.grad is None
    assert batch["target_last_hidden_states"].grad is None
    gate = loss.parts["lambda"][0]
    ce, weight = loss.parts["ce"]
    assert gate == pytest.approx(0.3 * float(ce / weight))
    assert not gate.requires_grad


def test_refinement_alone_trains_the_backbone() -> None:
    """u is not detached: with only the refinement in the loss, the first layer still gets a gradient."""
    model, batch, blocks = make_model(), make_batch(), make_blocks(ANCHORS)
    before = forward(model, batch, blocks, beta=0.0)
    out = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks, with_features=True)
    model.draft_model.refine(out.pre_injection[0, :, 1], batch["input_ids"][0, 4:7]).sum().backward()
    assert model.draft_model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert torch.isfinite(before.numerator)


def test_label_is_not_inserted_into_the_candidates() -> None:
    model, batch, blocks = make_model(), make_batch(), make_blocks([list(range(4, 16))] * 2)
    coverage = forward(model, batch, blocks).parts["coverage"]
    assert 0 < coverage[0] < coverage[1]


def test_bfloat16_softmaxes_are_float32() -> None:
    model, batch, blocks = make_model(dtype=torch.bfloat16), make_batch(dtype=torch.bfloat16), make_blocks(ANCHORS)
    loss = forward(model, batch, blocks)
    assert loss.numerator.dtype is torch.float32 and loss.parts["ce"][0].dtype is torch.float32


@pytest.mark.parametrize("options", [{}, {"ce_weight": 1.0}, {"ce_weight": 0.0}, {"refinement": False}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_that_comes_with_the_loss_is_its_gradient(options: dict[str, float], dtype: torch.dtype) -> None:
    """``distill`` against the same loss by automatic differentiation, in chunks and in one piece."""
    limit = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    results = []
    for implementation, chunk in ((distill_by_autograd, 0), (distill, 0), (distill, 2)):
        model = make_model(dtype=dtype, **options)
        model.distill, model.objective_chunk_blocks = implementation, chunk
        loss = forward(model, make_batch(dtype=dtype), make_blocks(ANCHORS))
        (loss.numerator * 3).backward()
        results.append((loss, {n: p.grad for n, p in model.draft_model.named_parameters()}))
    (reference, gradients), *others = results
    for loss, ours in others:
        assert torch.allclose(loss.numerator, reference.numerator, rtol=limit)
        for name, value in gradients.items():
            assert (ours[name] - value).norm() <= limit * value.norm(), name


def test_loss_and_gradient_agree_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (5, 11))
    p = torch.rand(5, 11, generator=generator, dtype=torch.float64).softmax(-1)
    label, weight = torch.tensor([3, 0, 10, 3, 7]), torch.tensor([1.0, 0.5, 0.25, 0.0, 2.0])
    settings = make_model(refinement=False, ce_weight=0.3).draft_model.settings

    def loss(states: torch.Tensor) -> torch.Tensor:
        return distill(states, head, Supervision(label, weight, p.clone()), settings).loss

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(),), eps=1e-7, atol=1e-6)
