"""Timing and predecessor interventions (§1) on the blocks of one captured response.

The response is the target's own, so its tokens are the right ones. x̂_1 .. x̂_M are the draft's proposals after an
anchor at a, as it would decode them. Layers count from 1.

    timing        A new block begins with the right token at a + k + 1. Of the k tokens between, scheduled layers
                  see the right ones; the others, and always layer 1, see x̂_1 .. x̂_k. K: consecutive right tokens
                  among the positions k + 2 .. M.
    predecessor   A new block begins at a + t − 1, for every t from 2 to M: right or predicted history before, right
                  or predicted token there. Is its first choice, for position t, right?
    carried       Predicted token, right history; but in scheduled layers the block attends to the key and value of
                  the right token in its place, from a block that begins with it.
    codes         No new block: in the one at a, the injection of scheduled layers reads the code of the right or of
                  the predicted predecessor, and not the feature of the neighbor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.proposal import propose
from specforge_dspine.decoding.sampling import GREEDY
from specforge_dspine.modeling.draft_model import DraftOutput, DSpineDraftModel
from specforge_dspine.objective.curriculum import sample_generator
from specforge_dspine.studies.branches import Branches, block_view, draft_from, history

BACKBONE, REFINED = "backbone", "refined"
RIGHT, PREDICTED = "right", "predicted"
NONE, ALL = "none", "all"
EVERY_SUBSET = 4  # up to so many layers, all of their subsets are schedules

Schedule = tuple[int, ...]
"""The layers, from 1, that an intervention changes."""


@contextmanager
def masks_by_layer(draft: DSpineDraftModel, masks: Mapping[int, Tensor]) -> Iterator[None]:
    """Let layer ℓ, from 0, attend by ``masks[ℓ]`` [R, 1, N·B, keys] (bool) instead of by the forward's own mask."""

    def replace(mask: Tensor, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, kwargs | {"attention_mask": mask}

    with ExitStack() as stack:
        for layer, mask in masks.items():
            hook = partial(replace, mask)
            stack.enter_context(draft.layers[layer].register_forward_pre_hook(hook, with_kwargs=True))
        yield


@contextmanager
def codes_by_layer(draft: DSpineDraftModel, predecessors: Mapping[int, Tensor]) -> Iterator[None]:
    """Let the injection after layer ℓ, from 0, read the codes of ``predecessors[ℓ]`` [R, N, M] in all slots 1..M.

    In other layers slot 1 reads the anchor's code and every later slot the feature of its neighbor, as usual.
    """

    def replace(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        layer, states, codes, known = args
        if layer in predecessors:
            codes, known = draft.codes(predecessors[layer], states.dtype), known | True
        return layer, states, codes, known

    assert draft.injection is not None
    with draft.injection.register_forward_pre_hook(replace):
        yield


def schedules(first: int, last: int) -> list[Schedule]:
    """Every subset of the layers ``first`` .. ``last``; if they are many: none, the last, it with each other, all."""
    layers = range(first, last + 1)
    if len(layers) <= EVERY_SUBSET:
        return [chosen for size in range(len(layers) + 1) for chosen in combinations(layers, size)]
    return [(), (last,), *((layer, last) for layer in layers[:-1]), tuple(layers)]


def schedule_name(schedule: Schedule) -> str:
    """A name such as "2+5", or "none"."""
    return "+".join(map(str, schedule)) or NONE


def whole_blocks(loss_mask: Tensor, proposals: int, name: str, *, limit: int, seed: int) -> Tensor:
    """At most ``limit`` ascending anchors [N] whose next M = ``proposals`` tokens lie in the response too."""
    inside = loss_mask.unfold(0, proposals + 1, 1).amin(dim=1) > 0 if len(loss_mask) > proposals else loss_mask[:0]
    anchors = inside.nonzero().flatten()
    order = torch.randperm(len(anchors), generator=sample_generator(seed, name))
    return anchors[order[:limit].to(anchors.device)].sort().values


def proposals_right(branches: Branches, k: int) -> dict[str, Tensor]:
    """Whether any of the first ``k`` proposals is wrong, ``history_wrong`` [N], and whether the proposals before the
    positions 2 .. M are right, ``predecessor_right`` [N, M − 1] (bool)."""
    steps = torch.arange(1, branches.tokens.shape[1] + 1, device=branches.tokens.device)
    right = branches.tokens == branches.label(steps[None])
    return {"history_wrong": ~right[:, :k].all(dim=1), "predecessor_right": right[:, :-1]}


def timing(drafter: BlockDrafter, branches: Branches, k: int) -> dict[str, dict[str, Tensor]]:
    """K [N] by output (backbone; refined, if the draft refines) and schedule; "all" includes layer 1."""
    draft, layers, block = drafter.draft, len(drafter.draft.layers), drafter.proposals + 1
    owner = torch.arange(len(branches.anchors), device=branches.ids.device)
    offset = torch.full_like(owner, k + 1)
    contexts = {predicted: history(branches, owner, offset, predicted=predicted) for predicted in (True, False)}
    masks = {each: block_view(contexts[each], block, causal=draft.settings.causal) for each in contexts}
    positions = branches.anchors + k + 1
    tokens = branches.ids[positions]
    rest = torch.arange(k + 2, block, device=owner.device)
    named = {schedule_name(chosen): chosen for chosen in schedules(2, layers)} | {ALL: tuple(range(1, layers + 1))}
    lengths: dict[str, dict[str, Tensor]] = {}
    for name, chosen in named.items():
        with masks_by_layer(draft, {layer - 1: masks[False] for layer in chosen}):
            out = draft_from(draft, drafter.embedding, branches, positions, tokens, masks[True])
        for output, choice in choices(drafter, out, tokens, len(rest), refine=drafter.refine).items():
            right = choice == branches.label(rest[None])
            lengths.setdefault(output, {})[name] = right.long().cumprod(dim=1).sum(dim=1)
    return lengths


def predecessor(drafter: BlockDrafter, branches: Branches) -> dict[str, Tensor]:
    """Whether the first choice is right, [N, M − 1] (bool) for positions 2 .. M, by "history, predecessor"."""
    right: dict[str, Tensor] = {}
    for before in (RIGHT, PREDICTED):
        blocks = PairedBlocks(drafter, branches, predicted_history=before == PREDICTED)
        right.update(zip((f"{before}, {RIGHT}", f"{before}, {PREDICTED}"), blocks.right(()), strict=True))
    return right


def carried(drafter: BlockDrafter, branches: Branches) -> dict[str, Tensor]:
    """Whether the first choice after a predicted token is right, [N, M − 1] (bool), by the layers that see the right
    token's key and value."""
    blocks = PairedBlocks(drafter, branches, predicted_history=False)
    layers = len(drafter.draft.layers)
    return {schedule_name(chosen): blocks.right(chosen)[1] for chosen in schedules(1, layers) if chosen}


class PairedBlocks:
    """Blocks that begin with the right and with the predicted token at the same position, in one forward.

    There are Q = N·(M−1) of either, those with the right token first. A causal block ends after its first mask slot,
    the one that is read, because later slots cannot reach it.
    """

    def __init__(self, drafter: BlockDrafter, branches: Branches, *, predicted_history: bool) -> None:
        self.drafter, self.branches = drafter, branches
        count, proposals = branches.tokens.shape
        steps = torch.arange(1, proposals, device=branches.ids.device)  # from the anchors to the new ones
        owner = torch.arange(count, device=steps.device).repeat_interleave(len(steps))
        offset = steps.repeat(count)
        causal = drafter.draft.settings.causal
        self.block = 2 if causal else proposals + 1
        self.positions = branches.anchors[owner] + offset
        self.tokens = torch.cat([branches.ids[self.positions], branches.tokens[:, :-1].flatten()])
        context = history(branches, owner, offset, predicted=predicted_history).repeat(2, 1)
        self.mask = block_view(context, self.block, causal=causal)
        self.labels = branches.label(steps[None] + 1)

    def right(self, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """Whether the blocks with the right and those with the predicted token choose right, [N, M − 1] (bool) each.

        In the layers of ``schedule`` the latter see the right token's key and value.
        """
        draft, embedding = self.drafter.draft, self.drafter.embedding
        with masks_by_layer(draft, {layer - 1: self.right_token_mask for layer in schedule}):
            out = draft_from(draft, embedding, self.branches, self.positions.repeat(2), self.tokens, self.mask)
        choice = choices(self.drafter, out, self.tokens, 1)[BACKBONE].reshape(2, *self.labels.shape)
        return choice[0] == self.labels, choice[1] == self.labels

    @cached_property
    def right_token_mask(self) -> Tensor:
        """The mask with which the mask slots after a predicted token see the paired right token in its place."""
        count = len(self.positions)
        mask = self.mask.clone()
        inside = mask[0, 0, :, mask.shape[-1] - 2 * count * self.block :]  # a view: blocks on blocks
        inside = inside.view(2, count, self.block, 2, count, self.block)
        index = torch.arange(count, device=mask.device)
        inside[1, index, 1:, 1, index, 0] = False
        inside[1, index, 1:, 0, index, 0] = True
        return mask


def codes(drafter: BlockDrafter, branches: Branches) -> dict[str, Tensor]:
    """Whether the backbone's first choice is right, [N, M − 1] (bool) for positions 2 .. M, by "source, layers".

    Layers: 1..j for every j, and the last alone, as in the refinement. "none" is the unchanged draft.
    """
    draft, layers = drafter.draft, len(drafter.draft.layers)
    owner = torch.arange(len(branches.anchors), device=branches.ids.device)
    context = history(branches, owner, torch.zeros_like(owner), predicted=False)
    mask = block_view(context, drafter.proposals + 1, causal=draft.settings.causal)
    first = branches.ids[branches.anchors]
    steps = torch.arange(drafter.proposals, device=owner.device)
    sources = {RIGHT: branches.label(steps[None]), PREDICTED: torch.cat([first[:, None], branches.tokens[:, :-1]], 1)}
    ranges = [tuple(range(1, j + 1)) for j in range(1, layers + 1)]
    chosen = [*ranges, (layers,)] if layers > 1 else ranges
    cases = [(RIGHT, ()), *product((RIGHT, PREDICTED), chosen)]
    right = {}
    for source, schedule in cases:
        known = {layer - 1: sources[source][None] for layer in schedule}
        with codes_by_layer(draft, known) if known else nullcontext():
            out = draft_from(draft, drafter.embedding, branches, branches.anchors, first, mask)
        choice = choices(drafter, out, first, drafter.proposals)[BACKBONE]
        name = f"{source}, {schedule_name(schedule)}" if schedule else NONE
        right[name] = (choice == branches.label(steps[None] + 1))[:, 1:]
    return right


@torch.inference_mode()
def choices(
    drafter: BlockDrafter, out: DraftOutput, anchor: Tensor, proposals: int, *, refine: bool = False
) -> dict[str, Tensor]:
    """First choices [Q, ``proposals``] of blocks with the anchors ``anchor`` [Q], by output.

    They are the backbone's and, with ``refine``, those of the greedy walk that decoding takes.
    """
    hidden, before = (states[0, :, : proposals + 1] for states in (out.hidden, out.pre_injection))

    def choose(refined: bool) -> Tensor:
        return propose(drafter.draft, drafter.head, hidden, before, anchor, GREEDY, refine=refined).tokens

    return {BACKBONE: choose(False)} | ({REFINED: choose(True)} if refine else {})


def position_groups(block: int) -> dict[str, Sequence[int]]:
    """Positions 1 .. B/4, B/4 + 1 .. B/2 and the rest of a block of B = ``block``, by name, such as "1–4".

    For B = 16 these are the paper's 1–4, 5–8 and 9–15. Divisions round down, the first group is never empty, and
    empty groups are left out.
    """
    quarter = max(1, block // 4)
    half = max(quarter, block // 2)
    ranges = (range(1, quarter + 1), range(quarter + 1, min(half, block - 1) + 1), range(half + 1, block))
    return {f"{r[0]}–{r[-1]}" if len(r) > 1 else f"{r[0]}": r for r in ranges if r}
