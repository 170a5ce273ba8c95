"""The draft: identity at the start, causality, the anchor, the curriculum's reach, the float32 table."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from specforge.modeling.draft.dflash import DFlashDraftModel

from specforge_dspine.modeling.attention_mask import block_mask
from tests.support.drafts import HIDDEN, MASK_ID, make_batch, make_blocks, make_model

ANCHORS = [[4, 6, 11], [5, 17]]  # 4 and 6: overlapping blocks (SpecForge#470); 17: past the end


def outputs(model, batch, blocks):  # type: ignore[no-untyped-def]
    return model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks, with_features=True)


def test_fresh_draft_is_dflash_with_a_causal_block() -> None:
    """SpecForge's own DFlash with the same backbone and a block-causal mask gives the same numbers, exactly."""
    model = make_model(trained=False)
    draft = model.draft_model
    plain = DFlashDraftModel(copy.deepcopy(draft.config)).double()
    backbone = {k: v for k, v in draft.state_dict().items() if not k.startswith(("injection", "transfer"))}
    plain.load_state_dict(backbone, strict=True)
    batch, blocks = make_batch(), make_blocks(ANCHORS)
    anchors, length, block = blocks.anchors, batch["input_ids"].shape[1], draft.block_size
    ids = torch.full((2, 3, block), MASK_ID)
    ids[..., 0] = torch.where(blocks.keep, batch["input_ids"].gather(1, anchors), MASK_ID)
    positions = (anchors.unsqueeze(-1) + torch.arange(block)).flatten(1)
    theirs = plain(
        position_ids=torch.cat([torch.arange(length).expand(2, -1), positions], dim=1),
        attention_mask=block_mask(anchors, blocks.keep, length, block, causal=True),
        noise_embedding=model.embed_tokens(ids.flatten(1)),
        target_hidden=batch["hidden_states"],
    )
    ours = outputs(model, batch, blocks).hidden.flatten(1, 2)
    assert torch.equal(ours, theirs)


def test_injection_changes_a_trained_draft() -> None:
    """The test above would be vacuous if the injection did nothing."""
    model, batch, blocks = make_model(), make_batch(), make_blocks(ANCHORS)
    before = outputs(model, batch, blocks).hidden
    with torch.no_grad():
        for write in model.draft_model.injection.writes:
            write.weight.zero_()
    after = outputs(model, batch, blocks).hidden
    assert (before - after)[0, :, 1:].abs().max() > 1e-2


@pytest.mark.parametrize("position", [6, 7, 8, 12])
def test_nothing_from_the_anchor_on_reaches_a_block(position: int) -> None:
    """Context is strictly below the anchor: neither states nor tokens from there on matter, but the anchor token."""
    model, batch, blocks = make_model(), make_batch(), make_blocks(ANCHORS)
    before = outputs(model, batch, blocks)
    batch["hidden_states"][:, position:] += 1
    changed = batch["input_ids"][:, position + 1 :]
    batch["input_ids"][:, position + 1 :] = (changed + 1) % MASK_ID
    after = outputs(model, batch, blocks)
    early = blocks.anchors <= position
    assert torch.equal(before.hidden[early], after.hidden[early])
    late = blocks.keep & (blocks.anchors > position + 1)
    if late.any():
        assert not torch.allclose(before.hidden[late], after.hidden[late])


def test_a_block_does_not_see_another_block() -> None:
    model, batch = make_model(), make_batch()
    both = outputs(model, batch, make_blocks([[4, 6], [5, 9]]))
    alone = outputs(model, batch, make_blocks([[6], [9]]))
    assert torch.allclose(both.hidden[:, 1], alone.hidden[:, 0], atol=1e-12)


def test_later_slots_do_not_reach_earlier_ones() -> None:
    """Replacing predecessors tells slot t the label of slot t − 1: slots before must not learn of it."""
    model, batch = make_model(block=5), make_batch()
    blocks = make_blocks(ANCHORS, [[True, True, True], [True, True]])
    before = outputs(model, batch, blocks)
    ids = batch["input_ids"]
    ids[0, 6] = (ids[0, 6] + 1) % MASK_ID  # label of slot 2 of the block at 4: predecessor of slot 3
    after = outputs(model, batch, blocks)
    assert torch.equal(before.hidden[0, 0, :3], after.hidden[0, 0, :3])
    assert not torch.allclose(before.hidden[0, 0, 3:], after.hidden[0, 0, 3:])


def test_padding_blocks_are_finite_and_change_nothing() -> None:
    model, batch = make_model(), make_batch()
    padded = outputs(model, batch, make_blocks([[4, 6, 11], [5]]))
    alone = outputs(model, batch, make_blocks([[4, 6, 11], [5, 5, 5]]))
    assert torch.isfinite(padded.hidden).all()
    assert torch.equal(padded.hidden[0], alone.hidden[0])
    assert torch.equal(padded.hidden[1, 0], alone.hidden[1, 0])


def test_anchor_slot_is_untouched_and_feeds_slot_one_by_its_code() -> None:
    injection = make_model().draft_model.injection
    states = torch.randn(2, 3, 5, HIDDEN, dtype=torch.float64)
    codes = torch.randn(2, 3, 4, 12, dtype=torch.float64)
    known = torch.zeros(2, 3, 4, dtype=torch.bool)
    known[..., 0] = True
    out = injection(1, states, codes, known)
    assert torch.equal(out[..., 0, :], states[..., 0, :])
    moved = states.clone()
    moved[..., 0, :] += 1  # u_0 itself must not matter for slot 1
    assert torch.equal(injection(1, moved, codes, known)[..., 1:, :], out[..., 1:, :])
    assert not torch.allclose(injection(1, states, codes + 1, known)[..., 1, :], out[..., 1, :])
    assert torch.equal(injection(1, states, codes + 1, known)[..., 2:, :][..., 1:, :], out[..., 3:, :])


def test_messages_are_read_before_injection() -> None:
    """Slot 3's predecessor is u_2, whatever was just written to slot 2."""
    injection = make_model().draft_model.injection
    states = torch.randn(1, 1, 5, HIDDEN, dtype=torch.float64)
    codes = torch.randn(1, 1, 4, 12, dtype=torch.float64)
    known = torch.tensor([[[True, False, False, False]]])
    out = injection(0, states, codes, known)
    features = injection.feature(0, states)
    expected = injection.write(0, states[..., 3, :], features[..., 3, :], features[..., 2, :])
    assert torch.allclose(out[..., 3, :], expected, atol=1e-14)


@pytest.mark.parametrize("reach", [0, 1, 2, 3])
def test_replacement_reaches_only_chosen_blocks_and_shallow_layers(reach: int) -> None:
    model, batch = make_model(replacement_layers=reach), make_batch()
    seen: list[torch.Tensor] = []
    injection = model.draft_model.injection
    inner = injection.forward
    injection.forward = lambda layer, states, codes, known: (seen.append(known), inner(layer, states, codes, known))[
        1
    ]  # type: ignore[method-assign]
    outputs(model, batch, make_blocks(ANCHORS, [[True, False, True], [False, True]]))
    for layer, known in enumerate(seen):
        assert known[..., 0].all(), "slot 1 always gets the anchor's code"
        chosen = (
            torch.tensor([[True, False, True], [False, True, False]]) if layer < reach else torch.zeros(2, 3).bool()
        )
        assert torch.equal(known[..., 1:], chosen.unsqueeze(-1).expand(2, 3, 3))


def test_refine_redoes_the_last_write() -> None:
    """With the right predecessor the refinement is what a replaced last layer would have computed."""
    model, batch = make_model(layers=2, replacement_layers=2), make_batch()
    blocks = make_blocks(ANCHORS, [[True] * 3, [True] * 2])
    out = outputs(model, batch, blocks)
    before = (blocks.anchors.unsqueeze(-1) + torch.arange(4)).clamp(max=19)
    ids = batch["input_ids"].gather(1, before.flatten(1)).reshape(before.shape)
    refined = model.draft_model.refine(out.pre_injection[..., 1:, :], ids)
    assert torch.allclose(refined[blocks.keep], out.hidden[..., 1:, :][blocks.keep], atol=1e-12)


def test_table_stays_float32_whatever_the_module_becomes() -> None:
    draft = make_model(dtype=torch.float32).draft_model
    table = draft.transfer_codes.clone()
    for change in (draft.bfloat16, draft.half, lambda: draft.to(torch.bfloat16), lambda: draft.to("cpu")):
        change()
        assert draft.transfer_codes.dtype is torch.float32
        assert torch.equal(draft.transfer_codes, table)
        assert bool(draft.transfer_ready) and draft.transfer_ready.dtype is torch.bool
    assert draft.fc.weight.dtype is torch.bfloat16
    assert draft.codes(torch.tensor([1]), torch.bfloat16).dtype is torch.bfloat16


def test_a_trained_draft_keeps_its_table() -> None:
    from specforge_dspine.modeling.transfer_space import build_transfer_space

    draft = make_model().draft_model
    with pytest.raises(ValueError, match="already has its table"):
        draft.set_transfer_space(build_transfer_space(torch.randn(70, HIDDEN), 12))


def test_fresh_initialization_follows_the_paper() -> None:
    model = make_model(trained=False, seed=5)
    injection = model.draft_model.injection
    assert all(not write.weight.any() for write in injection.writes)
    assert not injection.predecessor_gate.weight.any() and not injection.bias.any()
    bound = 12**-0.5
    for layer in (injection.message, injection.receiver_gate):
        assert layer.weight.abs().max() <= bound and layer.weight.std() > bound / 3
    first, *others = (readout.weight for readout in injection.readouts)
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first @ first.T, torch.eye(12, dtype=torch.float64), atol=1e-9)


def test_rope_keeps_float32_frequencies() -> None:
    """In bfloat16 the frequencies would turn positions by radians: trained here, served elsewhere."""
    draft = make_model(dtype=torch.float32).draft_model
    frequencies = draft.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert torch.equal(draft.rotary_emb.inv_freq, frequencies)
    assert all(b.dtype.itemsize >= 4 for b in draft.buffers() if b.is_floating_point())


@pytest.mark.ranks
def test_forward_and_backward_under_fsdp() -> None:
    """Two CPU ranks, sharded as on GPUs: the same loss as unsharded, and gradients for the shards."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *("-m", "tests.support.fsdp_step"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
