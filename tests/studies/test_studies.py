"""Studies of a draft's layers: interventions against ordinary forwards, constructed drafts, readouts, commands."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from specforge_dspine.decoding.drafter import BlockDrafter, draft_all_anchors
from specforge_dspine.formats.writer import write_checkpoint
from specforge_dspine.modeling.blocks import forward_blocks
from specforge_dspine.modeling.draft_config import small_draft_config
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.studies.__main__ import main
from specforge_dspine.studies.branches import Branches, block_view, draft_from, encode, history
from specforge_dspine.studies.interventions import (
    PairedBlocks,
    carried,
    codes,
    codes_by_layer,
    masks_by_layer,
    position_groups,
    predecessor,
    proposals_right,
    schedule_name,
    schedules,
    timing,
    whole_blocks,
)
from specforge_dspine.studies.readout import LayerStates, Readouts, captured_states, count_right, fit, recorded_states
from specforge_dspine.studies.report import readout_markdown, remarks, timing_markdown
from specforge_dspine.studies.statistics import difference, intervention_figures, ratio, relative
from specforge_dspine.utils.files import read_json, to_line
from specforge_dspine.utils.ledger import Ledger
from tests.support import ROOT
from tests.support.drafts import HIDDEN, MASK_ID, VOCAB, make_batch, make_blocks, make_model
from tests.support.features import write_features
from tests.support.pairs import TAPS, tiny_drafter, tiny_target
from tests.support.small import save_tokenizer, write_samples
from tests.support.targets import build_qwen3

WORDS, BLOCK, M = 8, 8, 7  # few words, so that a random draft is sometimes right
ANCHORS = [5, 8, 11, 14, 17, 20]
SEEDS = {"dspine": 1, "causal": 2, "dflash": 5}  # of drafts for which it matters what is right where
KINDS: dict[str, dict[str, Any]] = {
    "dspine": {},
    "causal": {"injection": False, "alignment": "off"},
    "dflash": {"injection": False, "alignment": "off", "causal": False},
}


class ToyStudy:
    """A tiny target's own greedy response, and the branches of a random draft's proposals on it."""

    def __init__(self, kind: str) -> None:
        self.target = tiny_target(WORDS)
        self.drafter: BlockDrafter = tiny_drafter(self.target, seed=SEEDS[kind], block=BLOCK, **KINDS[kind])
        self.draft = self.drafter.draft
        prompt = torch.tensor([[3, 6, 1, 2]])
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        self.ids = self.target.generate(prompt, max_new_tokens=26, eos_token_id=None, **options)[0]
        self.anchors = torch.tensor(ANCHORS)
        self.taps = self.states(self.ids)
        proposed = draft_all_anchors(self.drafter, self.ids, self.taps, self.anchors).tokens
        self.branches = encode(self.target, TAPS, self.ids, self.anchors, proposed)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        found = self.target(ids[None], output_hidden_states=True).hidden_states
        return torch.cat([found[layer + 1][0] for layer in TAPS], dim=-1)

    @torch.no_grad()
    def block(self, ids: Tensor, at: int, right_in: tuple[int, ...] = ()) -> Any:
        """The draft's ordinary forward over one block of ``ids``, with target states of ``ids``; in the layers
        ``right_in`` with those of the right sequence."""
        right = self.draft.hidden_norm(self.draft.fc(self.taps[None]))
        handles = [
            self.draft.layers[layer - 1].register_forward_pre_hook(
                lambda _layer, args, kwargs: (args, kwargs | {"target_hidden": right}), with_kwargs=True
            )
            for layer in right_in
        ]
        states, blocks = self.states(ids)[None], make_blocks([[at]])
        out = forward_blocks(self.draft, lambda k: self.drafter.embedding[k], ids[None], states, blocks)
        for handle in handles:
            handle.remove()
        return out

    def substituted(self, n: int, count: int, token: int | None = None) -> Tensor:
        """The sequence with the first ``count`` proposals after anchor n, and perhaps ``token`` after these."""
        ids, at = self.ids.clone(), ANCHORS[n] + 1
        ids[at : at + count] = self.branches.tokens[n, :count]
        if token is not None:
            ids[at + count] = token
        return ids

    def first_choices(self, ids: Tensor, at: int, right_in: tuple[int, ...] = ()) -> list[int]:
        """Of the backbone, among what can be emitted at all: all but the mask, which is the last row."""
        return (self.block(ids, at, right_in).hidden[0, 0, 1:] @ self.drafter.head.T)[:, :-1].argmax(dim=1).tolist()


@pytest.fixture(scope="module", params=sorted(KINDS))
def toy(request: pytest.FixtureRequest) -> ToyStudy:
    return ToyStudy(request.param)


def test_branches_are_encoded_as_sequences_of_their_own(toy: ToyStudy) -> None:
    length = len(toy.ids)
    assert not torch.equal(toy.branches.tokens[:, :M], toy.branches.label(torch.arange(1, M + 1)[None]))
    torch.testing.assert_close(toy.branches.taps[:length], toy.taps, rtol=1e-4, atol=1e-5)
    for n, anchor in enumerate(ANCHORS):
        own = toy.branches.taps[length + n * M : length + (n + 1) * M]
        expected = toy.states(toy.substituted(n, M))[anchor + 1 : anchor + 1 + M]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("predicted", [False, True])
def test_a_new_block_is_an_ordinary_one_on_that_history(toy: ToyStudy, predicted: bool) -> None:
    """Right history: the forward from the new anchor. Predicted: the same on the sequence with proposals in it."""
    for offset in range(M):
        owner = torch.arange(len(ANCHORS))
        context = history(toy.branches, owner, torch.full_like(owner, offset), predicted=predicted)
        mask = block_view(context, BLOCK, causal=toy.draft.settings.causal)
        positions = toy.anchors + offset
        out = draft_from(toy.draft, toy.drafter.embedding, toy.branches, positions, toy.ids[positions], mask)
        for n, at in enumerate(positions.tolist()):
            ids = toy.substituted(n, max(0, offset - 1)) if predicted else toy.ids
            expected = toy.block(ids, at)
            torch.testing.assert_close(out.hidden[0, n], expected.hidden[0, 0], rtol=1e-3, atol=1e-4)


def test_timing_counts_what_the_ordinary_forward_would(toy: ToyStudy) -> None:
    k = 2
    found = timing(toy.drafter, toy.branches, k)
    assert set(found) == ({"backbone", "refined"} if toy.draft.settings.refinement else {"backbone"})
    assert set(found["backbone"]) == {"none", "2", "all"}
    for schedule, right_in in (("none", ()), ("2", (2,)), ("all", (1, 2))):
        for n, anchor in enumerate(ANCHORS):
            at, right = anchor + k + 1, 0
            chosen = toy.first_choices(toy.substituted(n, k), at, right_in)
            while right < M - k - 1 and chosen[right] == int(toy.ids[at + right + 1]):
                right += 1
            assert found["backbone"][schedule][n] == right, (schedule, n)
    assert not torch.equal(found["backbone"]["none"], found["backbone"]["all"])


def test_what_is_right_of_the_proposals(toy: ToyStudy) -> None:
    for k in range(3):
        found = proposals_right(toy.branches, k)
        assert found["predecessor_right"].shape == (len(ANCHORS), M - 1)
        for n, anchor in enumerate(ANCHORS):
            right = [int(toy.branches.tokens[n, t]) == int(toy.ids[anchor + t + 1]) for t in range(M)]
            assert found["history_wrong"][n] == (not all(right[:k]))
            assert found["predecessor_right"][n].tolist() == right[:-1]


def test_predecessors_are_compared_as_the_ordinary_forward_would(toy: ToyStudy) -> None:
    found = predecessor(toy.drafter, toy.branches)
    for case, flags in found.items():
        before, token = case.split(", ")
        for n, anchor in enumerate(ANCHORS[:3]):
            for t in range(2, M + 1):
                own = int(toy.branches.tokens[n, t - 2]) if token == "predicted" else int(toy.ids[anchor + t - 1])
                ids = toy.substituted(n, t - 2 if before == "predicted" else 0)
                ids[anchor + t - 1] = own
                right = toy.first_choices(ids, anchor + t - 1)[0] == int(toy.ids[anchor + t])
                assert bool(flags[n, t - 2]) == right, (case, n, t)
    for case in ("right, predicted", "predicted, right"):
        assert not torch.equal(found[case], found["right, right"])


def choosing(toy: ToyStudy, schedule: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Final states of the first slots of the blocks with the right and with the predicted token."""
    blocks = PairedBlocks(toy.drafter, toy.branches, predicted_history=False)
    mask = blocks.right_token_mask
    with masks_by_layer(toy.draft, {layer - 1: mask for layer in schedule}):
        embedding, positions = toy.drafter.embedding, blocks.positions.repeat(2)
        out = draft_from(toy.draft, embedding, toy.branches, positions, blocks.tokens, blocks.mask)
    right, predicted = out.hidden[0, :, 1].chunk(2)
    return right, predicted


@pytest.mark.parametrize("kind", ["causal", "dflash"])
def test_a_predecessor_carried_into_every_layer_is_the_right_one(kind: str) -> None:
    """Without injections the anchor speaks to the other slots by its keys and values alone."""
    toy = ToyStudy(kind)
    wrong = (toy.branches.tokens[:, :-1] != toy.branches.label(torch.arange(1, M)[None])).flatten()
    assert wrong.any()
    right, alone = choosing(toy, ())
    assert (right - alone)[wrong].norm(dim=-1).min() > 1e-3
    again, every = choosing(toy, (1, 2))
    torch.testing.assert_close(again, right, rtol=0, atol=0)
    torch.testing.assert_close(every, right, rtol=1e-4, atol=1e-5)
    for schedule in ((1,), (2,)):
        assert (choosing(toy, schedule)[1] - right)[wrong].norm(dim=-1).min() > 1e-4
    found = carried(toy.drafter, toy.branches)
    assert torch.equal(found["1+2"], predecessor(toy.drafter, toy.branches)["right, right"])


def test_a_draft_that_reads_its_predecessor_in_layer_2_alone_shows_it() -> None:
    toy = ToyStudy("causal")
    with torch.no_grad():
        toy.draft.layers[0].self_attn.o_proj.weight.zero_()  # layer 1 sees nothing of other slots
        toy.draft.layers[1].self_attn.o_proj.weight.mul_(8)
    right, alone = choosing(toy, ())
    torch.testing.assert_close(choosing(toy, (1,))[1], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(choosing(toy, (2,))[1], right, rtol=1e-4, atol=1e-5)
    assert (right - alone).norm(dim=-1).max() > 1e-2
    found, ends = carried(toy.drafter, toy.branches), predecessor(toy.drafter, toy.branches)
    assert torch.equal(found["1"], ends["right, predicted"]) and torch.equal(found["2"], ends["right, right"])
    assert not torch.equal(found["1"], found["2"])


def test_codes_in_the_last_layer_are_the_refinement() -> None:
    toy = ToyStudy("dspine")
    found = codes(toy.drafter, toy.branches)
    assert list(found)[:4] == ["none", "right, 1", "right, 1+2", "right, 2"]
    differing = 0
    for n, anchor in enumerate(ANCHORS):
        out = toy.block(toy.ids, anchor)
        sources = {
            "right": toy.ids[anchor : anchor + M],
            "predicted": torch.cat([toy.ids[anchor][None], toy.branches.tokens[n, :-1]]),
        }
        labels = toy.ids[anchor + 1 : anchor + BLOCK]
        for source, tokens in sources.items():
            with torch.no_grad():
                refined = toy.draft.refine(out.pre_injection[0, 0, 1:], tokens)
            right = (refined @ toy.drafter.head.T)[:, :-1].argmax(dim=1) == labels
            assert torch.equal(found[f"{source}, 2"][n], right[1:])
        differing += int((found["right, 2"][n] != found["none"][n]).sum())
    assert differing > 0


def test_codes_act_in_the_layers_that_write_them() -> None:
    """Only layer 2 of three writes: codes in layer 1 change nothing, in layers 1..2 all that they ever change."""
    model = make_model(layers=3, block=6)
    draft, batch = model.draft_model, make_batch(1, 20)
    with torch.no_grad():
        for layer in (0, 2):
            draft.injection.writes[layer].weight.zero_()
    blocks = make_blocks([[6, 9]])
    tokens = torch.randint(0, MASK_ID, (1, 2, 5), generator=torch.Generator().manual_seed(0))

    def states(*layers: int) -> list[Tensor]:
        with recorded_states(draft) as found, codes_by_layer(draft, dict.fromkeys(layers, tokens)), torch.no_grad():
            model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks)
        return found

    plain, first, second, both = states(), states(0), states(1), states(0, 1)
    assert all(torch.equal(x, y) for x, y in zip(plain, first, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(second, both, strict=True))
    assert torch.equal(plain[0], second[0])
    assert not torch.allclose(plain[1], second[1]) and not torch.allclose(plain[2], second[2])


def test_a_layers_context_changes_that_layer_and_later_ones_alone() -> None:
    model = make_model(layers=3, block=BLOCK)
    draft, batch = model.draft_model, make_batch(1, 20)
    anchors, owner = torch.tensor([5, 9]), torch.arange(2)
    extra = torch.randn(1, 2 * M, batch["hidden_states"].shape[-1], dtype=torch.float64)
    taps = torch.cat([batch["hidden_states"], extra], dim=1)[0]
    branches = Branches(batch["input_ids"][0], anchors, torch.randint(0, MASK_ID, (2, M)), taps)
    views = {
        predicted: block_view(
            history(branches, owner, torch.full_like(owner, 3), predicted=predicted), BLOCK, causal=True
        )
        for predicted in (False, True)
    }
    embedding = model.embed_tokens.weight

    def states(*layers: int) -> list[Tensor]:
        with masks_by_layer(draft, dict.fromkeys(layers, views[False])), recorded_states(draft) as found:
            tokens = branches.ids[anchors + 3]
            out = draft_from(draft, embedding, branches, anchors + 3, tokens, views[True])
        torch.testing.assert_close(draft.norm(found[-1]).reshape(out.hidden.shape), out.hidden, rtol=0, atol=0)
        return found

    plain = states()
    assert len(plain) == 3
    for first in range(3):
        changed = states(first)
        for layer in range(3):
            assert torch.equal(changed[layer], plain[layer]) == (layer < first), (first, layer)
    ordinary = model.forward_blocks(batch["input_ids"], batch["hidden_states"], make_blocks([[8, 12]]))
    torch.testing.assert_close(draft.norm(states(0, 1, 2)[-1]).reshape(ordinary.hidden.shape), ordinary.hidden)


def test_recorded_states_are_those_after_the_injection() -> None:
    model = make_model(layers=2)
    draft, batch, blocks = model.draft_model, make_batch(1, 20), make_blocks([[6, 9]])
    with recorded_states(draft) as states, torch.no_grad():
        out = model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    assert len(states) == 2
    assert not torch.allclose(states[-1].reshape(out.pre_injection.shape), out.pre_injection)
    torch.testing.assert_close(draft.norm(states[-1]).reshape(out.hidden.shape), out.hidden, rtol=0, atol=0)
    with torch.no_grad():
        model.forward_blocks(batch["input_ids"], batch["hidden_states"], blocks)
    assert len(states) == 2, "outside of the context nothing is recorded"


def test_schedules_and_groups() -> None:
    assert [schedule_name(each) for each in schedules(2, 2)] == ["none", "2"]
    assert [schedule_name(each) for each in schedules(2, 3)] == ["none", "2", "3", "2+3"]
    assert len(schedules(2, 5)) == 16 and {(2, 5), (3, 5), (4, 5), (5,), (2, 3, 4, 5)} <= set(schedules(2, 5))
    assert schedules(1, 5) == [(), (5,), (1, 5), (2, 5), (3, 5), (4, 5), (1, 2, 3, 4, 5)]
    assert list(position_groups(16)) == ["1–4", "5–8", "9–15"]
    assert list(position_groups(8)) == ["1–2", "3–4", "5–7"]
    for block in range(2, 33):
        assert [t for group in position_groups(block).values() for t in group] == list(range(1, block))


def test_whole_blocks_lie_inside_of_responses() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1])
    assert whole_blocks(mask, 3, "a", limit=9, seed=0).tolist() == [2, 3]
    assert whole_blocks(mask, 5, "a", limit=9, seed=0).tolist() == []
    assert whole_blocks(mask[:3], 3, "a", limit=9, seed=0).tolist() == []
    long = torch.ones(50, dtype=torch.long)
    drawn = [
        whole_blocks(long, 3, name, limit=5, seed=seed).tolist() for name, seed in (("a", 0), ("a", 0), ("b", 0))
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 5 and drawn[0] == sorted(drawn[0])


def test_intervals_are_those_of_prompts() -> None:
    """Of 100 prompts with 20 equal positions each, the spread is that of 100 draws, not of 2000."""
    hits = np.array([20.0] * 30 + [0.0] * 70)
    counts = np.full(100, 20.0)
    figure = ratio((hits, counts))
    assert figure["value"] == pytest.approx(0.3) and figure["count"] == 2000
    width = figure["interval_95"][1] - figure["interval_95"][0]
    assert width == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 100), rel=0.1)
    shifted = (hits[::-1] * 0.5, counts)
    assert difference((hits, counts), (hits, counts))["interval_95"] == (0, 0), "paired"
    assert difference((hits, counts), shifted)["value"] == pytest.approx(0.15)
    assert relative(shifted, (hits, counts))["value"] == pytest.approx(-0.5)
    assert ratio((0 * hits, 0 * counts))["value"] is None


def test_published_pages_are_what_their_numbers_give() -> None:
    folder = ROOT / "docs" / "results" / "studies"
    readout, timing = (read_json(folder / f"{name}.json") for name in ("readout", "timing"))
    assert readout_markdown(readout) == (folder / "readout.md").read_text(encoding="utf-8")
    assert timing_markdown(timing) == (folder / "timing.md").read_text(encoding="utf-8")
    assert remarks(timing) == timing["notes"]


def planted(count: int, seed: int, *, vocab: int = 40, width: int = 32) -> tuple[LayerStates, Tensor]:
    """Layer 1 holds noise, layer 2 a linear code of the label, in directions that the head does not read."""
    fixed = torch.Generator().manual_seed(0)
    head = torch.randn(vocab, width, generator=fixed) / 4
    code = torch.randn(vocab, width, generator=fixed)
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, vocab, (count,), generator=generator)
    noise = torch.randn(2, count, width, generator=generator)
    states = torch.stack([noise[0], code[label] + 0.1 * noise[1]])
    return LayerStates(states, label, torch.arange(count) % 3 + 1, {}), head


def readouts_for(states: LayerStates, rank: int = 32) -> Readouts:
    return Readouts(len(states.states), states.states.shape[-1], rank, torch.Generator().manual_seed(0))


def test_a_readout_starts_as_the_head_on_the_normalized_state() -> None:
    states, head = planted(50, 1)
    state = states.states[1]
    unit = state / state.square().mean(dim=-1, keepdim=True).sqrt()
    expected = (unit @ head.T).softmax(dim=-1)
    torch.testing.assert_close(readouts_for(states)(1, state, head).softmax(dim=-1), expected)


def test_a_planted_code_is_recovered_in_its_layer_alone() -> None:
    selection, head = planted(200, 2)
    fresh, _ = planted(300, 3)
    readouts = readouts_for(selection)
    before = count_right(readouts, head, fresh, 3)
    history = fit(readouts, head, (planted(200, 100 + step)[0] for step in count()), selection, steps=300, rate=1e-2)
    after = count_right(readouts, head, fresh, 3)
    assert after["count"].tolist() == [100, 100, 100]
    assert before["2"].sum() < 60 and after["2"].sum() > 290
    assert after["1"].sum() < 40, "noise stays noise: 1 in 40"
    assert [each["step"] for each in history] == [0, 60, 120, 180, 240, 300]
    assert history[-1]["ce"][1] < 0.2 < 3 < history[-1]["ce"][0]


def test_what_selects_decides_layer_by_layer() -> None:
    """Steps that harm layer 1, whose states are noise, and help layer 2: the one stays as it was, the other moves."""
    selection, head = planted(200, 2)
    readouts = readouts_for(selection)
    start = readouts.bias.detach().clone()
    history = fit(readouts, head, (planted(20, 100 + step)[0] for step in count()), selection, steps=20, rate=0.05)
    assert min(history, key=lambda each: each["ce"][0])["step"] == 0
    assert torch.equal(readouts.bias[0], start[0]) and not readouts.up[0].any()
    assert readouts.up[1].any() and history[-1]["ce"][1] < history[0]["ce"][1]


def test_captured_states_come_with_labels_and_choices_of_their_slots() -> None:
    model = make_model(block=5, dtype=torch.float32)
    draft, batch = model.draft_model, make_batch(1, 20, dtype=torch.float32)
    drafter = BlockDrafter(draft, model.lm_head.weight, model.embed_tokens.weight)
    ids = batch["input_ids"][0]
    mask = torch.tensor([0] * 14 + [1] * 4 + [0] * 2)  # anchors 14, 15 and 16
    record = {"input_ids": ids, "loss_mask": mask, "hidden_states": batch["hidden_states"]}
    states = captured_states(drafter, record, "x", anchors=9, seed=0, with_choices=True)
    places = [(a, t) for a in (14, 15, 16) for t in range(1, 18 - a)]
    assert states.slot.tolist() == [t for _, t in places]
    assert states.label.tolist() == [int(ids[a + t]) for a, t in places]
    assert states.states.shape == (3, 6, HIDDEN)
    out = drafter.draft(  # one block by itself
        position_ids=torch.cat([torch.arange(15), torch.arange(15, 20)])[None],
        attention_mask=block_view(torch.ones(1, 15, dtype=torch.bool), 5, causal=True),
        noise_embedding=drafter.embedding[torch.tensor([int(ids[15]), *[MASK_ID] * 4])][None],
        target_hidden=batch["hidden_states"][:, :15],
        predecessor_ids=ids[15:19][None, None],
    )
    row = places.index((15, 2))
    torch.testing.assert_close(draft.norm(states.states[-1, row]), out.hidden[0, 0, 2], rtol=1e-4, atol=1e-4)
    logits = F.linear(out.hidden[0, 0, 2], drafter.head)
    logits[MASK_ID] = -torch.inf
    assert states.choices["backbone"][row] == logits.argmax()
    options = logits.topk(draft.settings.top_k).indices
    refined = draft.refine(out.pre_injection[0, 0, 2], ids[16])
    assert states.choices["refined"][row] == options[(drafter.head[options] @ refined).argmax()]
    assert states.label.max() < VOCAB
    nothing = record | {"loss_mask": torch.zeros(20, dtype=torch.long)}
    assert len(captured_states(drafter, nothing, "x", anchors=9, seed=0).label) == 0


def test_right_choices_are_counted_where_they_are() -> None:
    label = torch.tensor([4, 4, 7, 9])
    states = LayerStates(
        torch.zeros(1, 4, 8), label, torch.tensor([1, 1, 3, 2]), {"backbone": torch.tensor([4, 5, 7, 9])}
    )
    found = count_right(readouts_for(states), torch.zeros(12, 8), states, 3)
    assert found["count"].tolist() == [2, 1, 1] and found["backbone"].tolist() == [1, 1, 1]
    assert found["1"].tolist() == [0, 0, 0], "all logits equal: id 0 is the first choice"


def test_figures_follow_from_the_records() -> None:
    """Two prompts, blocks of 4: three blocks, of which two had a wrong history."""
    shape = {"right, right": 1, "right, predicted": 0, "predicted, right": 1, "predicted, predicted": 0}
    first = {
        "blocks": 2,
        "history_wrong": [1, 0],
        "predecessor_right": [[0, 1], [1, 1]],
        "timing": {"backbone": {"none": [1, 2], "2": [2, 2], "all": [2, 2]}},
        "predecessor": {case: [[value, 1], [1, 1]] for case, value in shape.items()},
        "carried": {"2": [[1, 1], [1, 0]]},
    }
    second = {
        "blocks": 1,
        "history_wrong": [1],
        "predecessor_right": [[0, 0]],
        "timing": {"backbone": {"none": [1], "2": [2], "all": [3]}},
        "predecessor": {case: [[value, 0]] for case, value in shape.items()},
        "carried": {"2": [[1, 0]]},
    }
    found = intervention_figures([first, second], 4)
    assert found["blocks"] == 3 and "codes" not in found
    assert found["timing"]["history_wrong"]["value"] == pytest.approx(2 / 3)
    run = found["timing"]["outputs"]["backbone"]
    assert run["none"]["K"]["value"] == pytest.approx(4 / 3) and "relative" not in run["none"]
    assert run["2"]["relative"]["value"] == pytest.approx(6 / 4 - 1)
    assert run["2"]["difference"]["value"] == pytest.approx(2 / 3)
    assert run["2"]["where_history_wrong"]["relative"]["value"] == pytest.approx(4 / 2 - 1)
    assert run["all"]["where_history_wrong"]["K"]["value"] == pytest.approx(5 / 2)
    every, wrong, right = (found["predecessor"][where] for where in found["predecessor"])
    assert [where["cases"]["right, right"]["mean"]["count"] for where in (every, wrong, right)] == [6, 3, 3]
    assert wrong["cases"]["right, right"]["mean"]["value"] == pytest.approx(2 / 3)
    fall, gain, alone = every["differences"].values()
    assert fall["mean"]["value"] == gain["mean"]["value"] == pytest.approx(2 / 6)
    assert [each["value"] for each in fall["positions"]] == pytest.approx([2 / 3, 0])
    assert alone["mean"]["value"] == pytest.approx(2 / 6)
    assert right["differences"][next(iter(every["differences"]))]["mean"]["value"] == 0
    cases = found["carried"]["all"]["cases"]
    assert list(cases) == ["none", "2", "right token itself"]
    assert cases["2"]["mean"]["value"] == pytest.approx(4 / 6)
    assert cases["2"]["difference"]["value"] == pytest.approx(4 / 6 - 3 / 6)


LAYERS = [0, 2, 4]


def export_draft(target: Path, out: Path, kind: str) -> Path:
    """A draft with random weights for a tiny target; "dflash" with a config.json as others write it."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(target)
    settings = DSpineSettings(
        transfer_rank=16,
        message_size=8,
        top_k=4,
        replacement_layers=1,
        excluded_ids=(250,),
        valid_vocab_size=250,
        **KINDS[kind],
    )
    draft = DSpineDraftModel(
        small_draft_config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=64,
            rms_norm_eps=1e-6,
            theta=1e4,
            block_size=6,
            target_layer_ids=LAYERS,
            num_target_layers=config.num_hidden_layers,
            mask_token_id=250,
            settings=settings,
        )
    )
    if settings.has_readouts:
        draft.set_transfer_space(build_transfer_space(torch.randn(config.vocab_size, config.hidden_size), 16))
        with torch.no_grad():
            for parameter in draft.injection.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    write_checkpoint(draft.state_dict(), draft.config, "sglang", out, torch.float32)
    if kind == "dflash":
        path = out / "config.json"
        written = json.loads(path.read_text(encoding="utf-8"))
        del written["dspine_config"]
        path.write_text(json.dumps(written), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with features of it, and drafts for it."""
    root = tmp_path_factory.mktemp("studies")
    target = save_tokenizer(build_qwen3(root / "target"))
    for split, samples_count, seed in (("train", 6, 0), ("heldout", 6, 1)):
        samples = write_samples(root / f"{split}.jsonl", samples_count, seed=seed)
        write_features(target, samples, root / split, LAYERS)
    for kind in ("dspine", "dflash"):
        export_draft(target, root / kind, kind)
    return root


def words(root: Path, study: str, kind: str, out: Path, *extra: object) -> list[str]:
    """The command line of a study."""
    features = {"train": root / "train", "heldout": root / "heldout"}
    if study == "timing":
        del features["train"]
    fixed = {"draft": root / kind, "target": root / "target", **features, "out": out, "device": "cpu"}
    return [study, *(str(word) for name, value in fixed.items() for word in (f"--{name}", value)), *map(str, extra)]


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_the_readout_command(folders: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", 4, "--rank", 4, "--batch", 2, "--anchors", 3)
    assert main(words(folders, "readout", kind, tmp_path, *options)) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "readout.json").read_text(encoding="utf-8"))
    assert list(result["groups"]) == ["1", "2–3", "4–5"]
    own = {"backbone", "refined"} if kind == "dspine" else {"backbone"}
    for entry in result["groups"].values():
        assert set(entry) == {"1", "2"} | own
        for figure in entry.values():
            low, high = figure["interval_95"]
            assert 0 <= low <= figure["value"] <= high <= 1 and figure["count"] > 0
    assert result["samples"]["held-out prompts that select"] == 2
    assert result["samples"]["held-out prompts that measure"] == 4
    assert result["draft"]["injection"] is (kind == "dspine")
    assert len(result["draft"]["fingerprint"]) == 64 and result["versions"]["torch"] == torch.__version__
    assert "after the injection" in result["state"] and "paper" in result["paper"]["of"]
    assert (tmp_path / "readout.md").read_text(encoding="utf-8") in said
    assert (tmp_path / "readout.png").read_bytes()[:4] == b"\x89PNG"
    again = tmp_path / "again"
    assert main(words(folders, "readout", kind, again, *options)) == 0
    assert json.loads((again / "readout.json").read_text(encoding="utf-8"))["groups"] == result["groups"]


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_the_timing_command(folders: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folders, "timing", kind, tmp_path, "--anchors", 3)) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "timing.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text(encoding="utf-8").splitlines()]
    assert result["blocks"] == sum(record["blocks"] for record in records) > 0
    assert result["history"] == 1, "B / 2 − 2"
    assert result["recomputed_states_differ"] < 1e-4
    ours = [k for record in records for k in record["timing"]["backbone"]["2"]]
    assert result["timing"]["outputs"]["backbone"]["2"]["K"]["value"] == pytest.approx(np.mean(ours))
    flags = np.array([row for record in records for row in record["predecessor"]["right, predicted"]])
    at = np.array([row for record in records for row in record["predecessor_right"]])
    found = result["predecessor"]["predicted predecessor wrong"]["cases"]["right, predicted"]
    assert found["mean"]["count"] == (at == 0).sum()
    assert found["mean"]["value"] == pytest.approx(flags[at == 0].mean())
    assert [each["value"] for each in result["predecessor"]["all"]["cases"]["right, predicted"]["positions"]] == (
        pytest.approx(flags.mean(axis=0))
    )
    assert ("codes" in result) is (kind == "dspine")
    assert any("one schedule" in note for note in result["notes"])
    same = all(len(set(map(str, record["timing"][o].values()))) == 1 for record in records for o in record["timing"])
    assert same == any("hardly reads its history" in note for note in result["notes"])
    assert (tmp_path / "timing.md").read_text(encoding="utf-8") in said
    for picture in ("timing.png", "predecessor.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"


def test_a_stopped_study_continues_and_other_inputs_are_refused(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    arguments = ["--anchors", "2", "--limit", "2"]
    assert main(words(folders, "timing", "dspine", whole, *arguments)) == 0
    first = json.loads((whole / "timing.jsonl").read_text(encoding="utf-8").splitlines()[0]) | {"seconds": 0.125}
    inputs = json.loads((whole / "timing.jsonl.summary.json").read_text(encoding="utf-8"))["inputs"]
    with Ledger([stopped / "timing.jsonl"], inputs.pop("command"), inputs) as ledger:  # and no more before a kill
        ledger.keep(to_line(first))
        ledger.commit()
    assert main(words(folders, "timing", "dspine", stopped, *arguments)) == 0
    lines = [(each / "timing.jsonl").read_text(encoding="utf-8").splitlines() for each in (whole, stopped)]
    records = [[json.loads(line) for line in each] for each in lines]
    assert records[1][0]["seconds"] == 0.125, "what was there was not done again"
    assert [r | {"seconds": 0} for r in records[0]] == [r | {"seconds": 0} for r in records[1]]
    assert main(words(folders, "timing", "dspine", whole, "--anchors", "3")) == 2
    assert "anchors_per_sample was 2 and is now 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("study", "extra", "named"),
    [
        ("timing", ["--history", "4"], "--history 4: with blocks of 6, 0 to 3"),
        ("timing", ["--heldout", "{root}/target"], "holds no prompt"),
        ("timing", ["--draft", "{root}/heldout"], "config.json"),
        ("readout", ["--train", "{root}/heldout"], "6 samples of"),
        ("readout", ["--limit", "1"], "gives 1 sample"),
    ],
)
def test_unusable_studies_are_reported(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], study: str, extra: list[str], named: str
) -> None:
    filled = [word.replace("{root}", str(folders)) for word in extra]
    assert main(words(folders, study, "dspine", tmp_path, *filled)) == 2
    assert named in capsys.readouterr().err
