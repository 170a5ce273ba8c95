"""The timing and the predecessor interventions (§1) on the blocks of one captured answer.

The answer is the target's own, so its tokens are the right ones; x̂_1 .. x̂_M are the draft's proposals behind an
anchor at a, as it would decode them. Layers count from 1.

    timing        a new block begins with the right token at a + k + 1. Of the k tokens between, layers on a schedule
                  see the right ones, the others, and layer 1 always, see x̂_1 .. x̂_k. K: consecutive right tokens
                  among the positions k + 2 .. M.
    predecessor   a new block begins at a + t − 1, for every t from 2 to M: right or predicted history before, right
                  or predicted token there. Is its first choice, for position t, right?
    carried       predicted token, right history; but in layers on a schedule the block attends to the key and value
                  of the right token in its place, made by a block that begins with it.
    codes         no new block: in the one at a, the injection of layers on a schedule reads a token's code, the right
                  predecessor's or the predicted one's, and not the feature of the neighbor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations

import torch
from torch import Tensor

from specforge_dspine.decoding.candidates import candidates, excluded_mask
from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.proposal import propose_by_walk
from specforge_dspine.decoding.sampling import GREEDY
from specforge_dspine.decoding.transition_cache import transition_cache
from specforge_dspine.modeling.draft_model import DraftOutput
from specforge_dspine.objective.curriculum import sample_generator
from specforge_dspine.studies.branches import Branches, block_view, draft_from, history
from specforge_dspine.studies.layer_hooks import codes_by_layer, masks_by_layer

BACKBONE, REFINED = "backbone", "refined"
RIGHT, PREDICTED = "right", "predicted"
NONE, ALL = "none", "all"
EVERY_SUBSET = 4  # of at most so many layers

Schedule = tuple[int, ...]
"""The layers, from 1, that get something else."""


def schedules(first: int, last: int) -> list[Schedule]:
    """Every subset of the layers ``first`` .. ``last``; of many layers: none, the last, it with each other, all."""
    layers = range(first, last + 1)
    if len(layers) <= EVERY_SUBSET:
        return [chosen for size in range(len(layers) + 1) for chosen in combinations(layers, size)]
    return [(), (last,), *((layer, last) for layer in layers[:-1]), tuple(layers)]


def schedule_name(schedule: Schedule) -> str:
    """Such as "2+5"; no layer: "none"."""
    return "+".join(map(str, schedule)) or NONE


def whole_blocks(loss_mask: Tensor, proposals: int, name: str, *, limit: int, seed: int) -> Tensor:
    """At most ``limit`` anchors [N] with the M = ``proposals`` tokens behind them inside of an answer, ascending."""
    inside = loss_mask.unfold(0, proposals + 1, 1).amin(dim=1) > 0 if len(loss_mask) > proposals else loss_mask[:0]
    found = inside.nonzero().flatten()
    order = torch.randperm(len(found), generator=sample_generator(seed, name))
    return found[order[:limit].to(found.device)].sort().values


def proposals_right(branches: Branches, k: int) -> dict[str, Tensor]:
    """Of the proposals: is one of the first ``k`` wrong, ``history_wrong`` [N], and is the one before each
    of the positions 2 .. M right, ``predecessor_right`` [N, M − 1] (bool)."""
    steps = torch.arange(1, branches.tokens.shape[1] + 1, device=branches.tokens.device)
    right = branches.tokens == branches.label(steps[None])
    return {"history_wrong": ~right[:, :k].all(dim=1), "predecessor_right": right[:, :-1]}


def timing(drafter: BlockDrafter, branches: Branches, k: int) -> dict[str, dict[str, Tensor]]:
    """K [N] by output (backbone; refined, if the draft refines) and schedule; "all": layer 1 too."""
    draft, layers = drafter.draft, len(drafter.draft.layers)
    owner = torch.arange(len(branches.anchors), device=branches.ids.device)
    offset = torch.full_like(owner, k + 1)
    masks = {
        predicted: block_view(
            history(branches, owner, offset, predicted=predicted),
            drafter.proposals + 1,
            causal=draft.settings.causal,
        )
        for predicted in (True, False)
    }
    positions = branches.anchors + k + 1
    tokens = branches.ids[positions]
    rest = torch.arange(k + 2, drafter.proposals + 1, device=owner.device)
    named = {schedule_name(chosen): chosen for chosen in schedules(2, layers)} | {ALL: tuple(range(1, layers + 1))}
    found: dict[str, dict[str, Tensor]] = {}
    for name, chosen in named.items():
        with masks_by_layer(draft, {layer - 1: masks[False] for layer in chosen}):
            out = draft_from(draft, drafter.embedding, branches, positions, tokens, masks[True])
        for output, choice in choices(drafter, out, tokens, len(rest), refine=drafter.refine).items():
            right = choice == branches.label(rest[None])
            found.setdefault(output, {})[name] = right.long().cumprod(dim=1).sum(dim=1)
    return found


def predecessor(drafter: BlockDrafter, branches: Branches) -> dict[str, Tensor]:
    """Is the first choice right, [N, M − 1] (bool) for positions 2 .. M, by "history, predecessor"."""
    found: dict[str, Tensor] = {}
    for before in (RIGHT, PREDICTED):
        twins = Twins(drafter, branches, predicted_history=before == PREDICTED)
        found.update(zip((f"{before}, {RIGHT}", f"{before}, {PREDICTED}"), twins.right(()), strict=True))
    return found


def carried(drafter: BlockDrafter, branches: Branches) -> dict[str, Tensor]:
    """Is the first choice right behind a predicted token, [N, M − 1] (bool), by the layers that see the right one."""
    twins = Twins(drafter, branches, predicted_history=False)
    layers = len(drafter.draft.layers)
    return {schedule_name(chosen): twins.right(chosen)[1] for chosen in schedules(1, layers) if chosen}


class Twins:
    """Blocks that begin with the right and with the predicted token at the same place, in one forward.

    There are Q = N·(M−1) of either, right ones first. A causal block is cut behind its first mask slot, the one that
    is read: nothing later reaches it.
    """

    def __init__(self, drafter: BlockDrafter, branches: Branches, *, predicted_history: bool) -> None:
        self.drafter, self.branches = drafter, branches
        count, proposals = branches.tokens.shape
        steps = torch.arange(1, proposals, device=branches.ids.device)  # of the new anchors behind the old
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
        """Whether the blocks with the right and with the predicted token choose right [N, M − 1] (bool each); those
        with the predicted one see the right one's key and value in the layers of ``schedule``."""
        draft, embedding = self.drafter.draft, self.drafter.embedding
        lent = self.lending() if schedule else self.mask
        positions = self.positions.repeat(2)
        with masks_by_layer(draft, {layer - 1: lent for layer in schedule}):
            out = draft_from(draft, embedding, self.branches, positions, self.tokens, self.mask)
        choice = choices(self.drafter, out, self.tokens, 1)[BACKBONE].reshape(2, *self.labels.shape)
        return choice[0] == self.labels, choice[1] == self.labels

    def lending(self) -> Tensor:
        """The mask by which the mask slots behind a predicted token see its right twin in its place."""
        count = len(self.positions)
        mask = self.mask.clone()
        inside = mask[0, 0, :, mask.shape[-1] - 2 * count * self.block :]  # a view: blocks on blocks
        inside = inside.view(2, count, self.block, 2, count, self.block)
        index = torch.arange(count, device=mask.device)
        inside[1, index, 1:, 1, index, 0] = False
        inside[1, index, 1:, 0, index, 0] = True
        return mask


def codes(drafter: BlockDrafter, branches: Branches) -> dict[str, Tensor]:
    """Is the backbone's first choice right, [N, M − 1] (bool) for positions 2 .. M, by "source, layers"; "none": the
    draft as it is. Layers: 1..j for every j, and the last alone, which is what the refinement does."""
    draft, layers = drafter.draft, len(drafter.draft.layers)
    owner = torch.arange(len(branches.anchors), device=branches.ids.device)
    mask = block_view(
        history(branches, owner, torch.zeros_like(owner), predicted=False),
        drafter.proposals + 1,
        causal=draft.settings.causal,
    )
    first = branches.ids[branches.anchors]
    steps = torch.arange(drafter.proposals, device=owner.device)
    sources = {RIGHT: branches.label(steps[None]), PREDICTED: torch.cat([first[:, None], branches.tokens[:, :-1]], 1)}
    found = {}
    for name, source, chosen in code_schedules(layers):
        known = {layer - 1: sources[source][None] for layer in chosen}
        with codes_by_layer(draft, known) if known else nullcontext():
            out = draft_from(draft, drafter.embedding, branches, branches.anchors, first, mask)
        choice = choices(drafter, out, first, drafter.proposals)[BACKBONE]
        found[name] = (choice == branches.label(steps[None] + 1))[:, 1:]
    return found


def code_schedules(layers: int) -> Iterator[tuple[str, str, Schedule]]:
    """Name, source and layers of what ``codes`` tries."""
    yield NONE, RIGHT, ()
    ranges = [tuple(range(1, j + 1)) for j in range(1, layers + 1)]
    for source in (RIGHT, PREDICTED):
        for chosen in [*ranges, (layers,)] if layers > 1 else ranges:
            yield f"{source}, {schedule_name(chosen)}", source, chosen


@torch.inference_mode()
def choices(
    drafter: BlockDrafter, out: DraftOutput, anchor: Tensor, proposals: int, *, refine: bool = False
) -> dict[str, Tensor]:
    """First choices [Q, ``proposals``] of blocks: the backbone's and, with ``refine``, those of the greedy walk that
    decoding takes; ``anchor`` [Q]."""
    draft, head = drafter.draft, drafter.head
    excluded = excluded_mask(draft.settings, draft.mask_token_id, len(head), head.device)
    hidden, before = (states[0, :, 1 : proposals + 1] for states in (out.hidden, out.pre_injection))
    ids, _ = candidates(head, hidden, excluded, draft.settings.top_k)
    found = {BACKBONE: ids[..., 0]}
    if refine:
        scores = transition_cache(draft, head, before, ids, anchor)
        found[REFINED] = propose_by_walk(scores, ids, GREEDY).tokens
    return found


def position_groups(block: int) -> dict[str, Sequence[int]]:
    """Positions 1 .. B/4, B/4 + 1 .. B/2 and the rest of a block of B = ``block``, by name: for B = 16 the paper's
    1–4, 5–8 and 9–15. Divisions round down, a group has at least one position, and what is left empty is left out."""
    quarter = max(1, block // 4)
    half = max(quarter, block // 2)
    ranges = [range(1, min(quarter, block - 1) + 1), range(quarter + 1, min(half, block - 1) + 1)]
    ranges.append(range(half + 1, block))
    return {f"{r[0]}–{r[-1]}" if len(r) > 1 else f"{r[0]}": r for r in ranges if r}
