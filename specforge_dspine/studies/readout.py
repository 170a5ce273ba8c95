"""Readouts: what a small probe reads from every layer of a draft (§1).

    q_ℓ = softmax(E [n(h_ℓ) + U_ℓ V_ℓ n(h_ℓ) + b_ℓ])        n(h) = h / RMS(h)

E [V, H] is the target's frozen head. U_ℓ [H, ρ], V_ℓ [ρ, H] and b_ℓ [H] are fitted by cross-entropy on the right
tokens, from U_ℓ = 0 and b_ℓ = 0; ρ is the readout's rank. h_ℓ is the state as the next layer receives it: after the
injection, if the draft has one. The draft itself is not changed.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.proposal import candidates
from specforge_dspine.modeling.blocks import forward_blocks
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.objective.curriculum import draw_blocks
from specforge_dspine.objective.supervision import supervised_positions
from specforge_dspine.studies.interventions import BACKBONE, REFINED

EPS = 1e-6
CHUNK = 512  # positions whose logits exist at a time


class Readouts(nn.Module):
    """The readouts of L layers; ``down`` V [L, ρ, H], ``up`` U [L, H, ρ], ``bias`` b [L, H], float32."""

    def __init__(self, layers: int, hidden: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(layers, rank, hidden, generator=generator) / math.sqrt(hidden))
        self.up = nn.Parameter(torch.zeros(layers, hidden, rank))
        self.bias = nn.Parameter(torch.zeros(layers, hidden))

    def forward(self, layer: int, state: Tensor, head: Tensor) -> Tensor:
        """Logits [n, V] of ``state`` h_ℓ [n, H]; ``layer`` counts from 0."""
        unit = F.rms_norm(state.float(), state.shape[-1:], eps=EPS)
        return F.linear(unit + unit @ self.down[layer].T @ self.up[layer].T + self.bias[layer], head)


class LayerStates(NamedTuple):
    """States at n supervised positions of blocks.

    ``states`` h_1 .. h_L [L, n, H] in float32, ``label`` [n] the right token, ``slot`` [n] from 1, ``choices`` the
    draft's own first choices [n] by output.
    """

    states: Tensor
    label: Tensor
    slot: Tensor
    choices: dict[str, Tensor]


@contextlib.contextmanager
def recorded_states(draft: DSpineDraftModel) -> Iterator[list[Tensor]]:
    """A list that gets h_1 .. h_L [R, N·B, H] of every forward inside the context; h_L is what ``norm`` receives."""
    states: list[Tensor] = []

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(kwargs["hidden_states"] if kwargs else args[0])

    with contextlib.ExitStack() as stack:
        for reader in (*list(draft.layers)[1:], draft.norm):
            stack.enter_context(reader.register_forward_pre_hook(record, with_kwargs=True))
        yield states


@torch.no_grad()
def captured_states(
    drafter: BlockDrafter,
    record: dict[str, Tensor],
    draw: str,
    *,
    anchors: int,
    seed: int,
    with_choices: bool = False,
) -> LayerStates:
    """States of at most ``anchors`` blocks of a captured ``record``, drawn by ``seed`` and the name ``draw``.

    The choices are the backbone's, and those of the refinement with the right predecessor.
    """
    draft, device = drafter.draft, drafter.head.device
    ids, mask, taps = (record[name].to(device) for name in ("input_ids", "loss_mask", "hidden_states"))
    blocks = draw_blocks(record["loss_mask"][None], [draw], seed=seed, num_anchors=anchors, probability=0.0)
    blocks = blocks.to(device)
    with recorded_states(draft) as states:
        out = forward_blocks(
            draft, lambda known: drafter.embedding[known], ids[None], taps.to(drafter.embedding.dtype), blocks
        )
    rows = supervised_positions(ids[None], mask[None], blocks, int(draft.block_size), None)
    kept = rows.weight > 0  # where nothing is supervised there is one placeholder of weight 0
    at = (0, rows.block[kept], rows.slot[kept])
    choices: dict[str, Tensor] = {}
    if with_choices:
        options, _ = candidates(draft, drafter.head, out.hidden[at])
        choices[BACKBONE] = options[:, 0]
        if drafter.refine:
            refined = draft.refine(out.pre_injection[at].float(), rows.predecessor[kept])
            scores = torch.einsum("nh,nkh->nk", refined, drafter.head[options].float())
            choices[REFINED] = options.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    by_layer = torch.stack([state.reshape(out.hidden.shape)[at].float() for state in states])
    return LayerStates(by_layer, rows.label[kept], rows.slot[kept], choices)


def merged(parts: Sequence[LayerStates]) -> LayerStates:
    """States of several records as one, without the draft's own choices."""
    states, label, slot, _ = zip(*parts, strict=True)
    return LayerStates(torch.cat(states, dim=1), torch.cat(label), torch.cat(slot), {})


def fit(
    readouts: Readouts,
    head: Tensor,
    batches: Iterator[LayerStates],
    selection: LayerStates,
    *,
    steps: int,
    rate: float,
    checks: int = 5,
) -> list[dict[str, Any]]:
    """Fit ``readouts`` to ``batches`` in ``steps`` steps of Adam, whose rate falls linearly from ``rate`` to 0.

    Cross-entropy on ``selection`` is measured before the first step and ``checks`` times later. Each layer ends with
    the parameters of its lowest value. Returns the ``step`` of every check, and the layers' ``ce`` there.
    """
    optimizer = torch.optim.Adam(readouts.parameters(), lr=rate)
    due = {0, *(round(steps * k / checks) for k in range(1, checks + 1))}
    best = copy.deepcopy(readouts).requires_grad_(False)
    history: list[dict[str, Any]] = []
    with tqdm(range(steps + 1), desc="readouts", unit=" step") as bar:
        for step in bar:
            if step in due:
                ce = [cross_entropy(readouts, layer, head, selection) for layer in range(len(selection.states))]
                for layer, value in enumerate(ce):
                    if all(value < before["ce"][layer] for before in history):
                        for kept, now in zip(best.parameters(), readouts.parameters(), strict=True):
                            kept[layer] = now.detach()[layer]
                history.append({"step": step, "ce": ce})
                bar.set_postfix_str("held-out ce " + " ".join(f"{value:.2f}" for value in ce))
            if step == steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            states = next(batches)
            optimizer.zero_grad()
            for layer in range(len(states.states)):  # one layer's logits at a time
                for loss in chunk_losses(readouts, layer, head, states):
                    (loss / len(states.label)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    readouts.load_state_dict(best.state_dict())
    return history


def chunk_losses(readouts: Readouts, layer: int, head: Tensor, states: LayerStates) -> Iterator[Tensor]:
    """Cross-entropy of a layer, from 0, summed over each chunk of positions."""
    for part, label in zip(states.states[layer].split(CHUNK), states.label.split(CHUNK), strict=True):
        yield F.cross_entropy(readouts(layer, part, head), label, reduction="sum")


@torch.no_grad()
def cross_entropy(readouts: Readouts, layer: int, head: Tensor, states: LayerStates) -> float:
    """Mean cross-entropy of a layer, from 0."""
    return sum(map(float, chunk_losses(readouts, layer, head, states))) / max(1, len(states.label))


@torch.no_grad()
def count_right(readouts: Readouts, head: Tensor, states: LayerStates, proposals: int) -> dict[str, np.ndarray]:
    """Count right first choices at the positions 1 .. M = ``proposals``, [M] each.

    Keys: the layers "1" .. "L", the draft's own outputs, and "count" for the number of positions.
    """

    def by_position(flags: Tensor) -> np.ndarray:
        return torch.zeros(proposals).index_add(0, states.slot.cpu() - 1, flags.cpu().float()).numpy()

    counts = {"count": by_position(torch.ones_like(states.slot))}
    for layer, hidden in enumerate(states.states):
        parts = [readouts(layer, part, head).argmax(dim=1) for part in hidden.split(CHUNK)]
        counts[str(layer + 1)] = by_position(torch.cat(parts) == states.label)
    return counts | {name: by_position(choice == states.label) for name, choice in states.choices.items()}
