"""What can be read from every layer of a draft, by a small readout (§1).

    q_ℓ = softmax(E [n(h_ℓ) + U_ℓ V_ℓ n(h_ℓ) + b_ℓ])        n(h) = h / RMS(h)

with E [V, H] the target's frozen head, and U_ℓ [H, ρ], V_ℓ [ρ, H] and b_ℓ [H] fitted by cross-entropy on the right
tokens; U_ℓ = 0 and b_ℓ = 0 at the start, ρ is the readout's rank. h_ℓ is the state as the next layer receives it:
after the injection, in a draft that has one. The draft itself is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from specforge_dspine.decoding.candidates import candidates, excluded_mask
from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.modeling.blocks import forward_blocks
from specforge_dspine.objective.curriculum import draw_blocks
from specforge_dspine.objective.supervision import supervised_positions
from specforge_dspine.studies.interventions import BACKBONE, REFINED
from specforge_dspine.studies.layer_hooks import recorded_states

EPS = 1e-6
ROWS_AT_ONCE = 512  # of logits over the vocabulary


class Readouts(nn.Module):
    """The readouts of ``layers`` L layers; ``down`` V [L, ρ, H], ``up`` U [L, H, ρ], ``bias`` b [L, H], float32."""

    def __init__(self, layers: int, hidden: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(layers, rank, hidden, generator=generator) / math.sqrt(hidden))
        self.up = nn.Parameter(torch.zeros(layers, hidden, rank))
        self.bias = nn.Parameter(torch.zeros(layers, hidden))

    def forward(self, layer: int, state: Tensor, head: Tensor) -> Tensor:
        """Logits [n, V] of ``state`` h_ℓ [n, H]; ``layer`` counts from 0."""
        unit = F.rms_norm(state.float(), state.shape[-1:], eps=EPS)
        return F.linear(unit + unit @ self.down[layer].T @ self.up[layer].T + self.bias[layer], head)


class Rows(NamedTuple):
    """Supervised positions of blocks, n of them: ``states`` h_1 .. h_L [L, n, H] float32, ``label`` [n] the right
    token, ``slot`` [n] from 1; ``own`` by output the draft's own first choices [n]."""

    states: Tensor
    label: Tensor
    slot: Tensor
    own: dict[str, Tensor]


@torch.no_grad()
def captured_rows(
    drafter: BlockDrafter, record: dict[str, Tensor], draw: str, *, anchors: int, seed: int, own: bool = False
) -> Rows:
    """Rows of at most ``anchors`` blocks of a captured ``record``, drawn by ``seed`` and the name ``draw``.

    With ``own`` also the draft's choices: the backbone's, and the refinement's behind the right predecessor.
    """
    draft, device = drafter.draft, drafter.head.device
    ids, mask, taps = (record[name].to(device) for name in ("input_ids", "loss_mask", "hidden_states"))
    blocks = draw_blocks(record["loss_mask"][None], [draw], seed=seed, num_anchors=anchors, probability=0.0).to(
        device
    )
    with recorded_states(draft) as states:
        out = forward_blocks(
            draft, lambda known: drafter.embedding[known], ids[None], taps.to(drafter.embedding.dtype), blocks
        )
    rows = supervised_positions(ids[None], mask[None], blocks, int(draft.block_size), None)
    kept = rows.weight > 0  # else nothing is supervised, and one row stands in
    at = (0, rows.block[kept], rows.slot[kept])
    found: dict[str, Tensor] = {}
    if own:
        excluded = excluded_mask(draft.settings, draft.mask_token_id, len(drafter.head), device)
        options, _ = candidates(drafter.head, out.hidden[at], excluded, draft.settings.top_k)
        found[BACKBONE] = options[:, 0]
        if drafter.refine:
            refined = draft.refine(out.pre_injection[at].float(), rows.predecessor[kept])
            scores = torch.einsum("nh,nkh->nk", refined, drafter.head[options].float())
            found[REFINED] = options.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    shape = out.hidden.shape
    return Rows(
        states=torch.stack([state.reshape(shape)[at].float() for state in states]),
        label=rows.label[kept],
        slot=rows.slot[kept],
        own=found,
    )


def merged(parts: Sequence[Rows]) -> Rows:
    """Rows of several records as one, without the draft's own choices."""
    return Rows(
        states=torch.cat([part.states for part in parts], dim=1),
        label=torch.cat([part.label for part in parts]),
        slot=torch.cat([part.slot for part in parts]),
        own={},
    )


def fit(
    readouts: Readouts,
    head: Tensor,
    batch: Callable[[int], Rows],
    selection: Rows,
    *,
    steps: int,
    rate: float,
    checks: int = 5,
) -> list[dict[str, Any]]:
    """Fit ``readouts`` by Adam on ``batch(step)`` for ``steps`` steps, the rate falling linearly from ``rate`` to 0.

    Each layer in the end has what gave it the least cross-entropy on the rows ``selection``, which are looked at
    before the first step and ``checks`` times later. Returns per check its ``step`` and the layers' ``ce`` there.
    """
    optimizer = torch.optim.Adam(readouts.parameters(), lr=rate)
    due = {0, *(round(steps * k / checks) for k in range(1, checks + 1))}
    kept = [part.detach().clone() for part in readouts.parameters()]
    history: list[dict[str, Any]] = []
    with tqdm(range(steps + 1), desc="readouts", unit=" step") as bar:
        for step in bar:
            if step in due:
                ce = [cross_entropy(readouts, layer, head, selection) for layer in range(len(selection.states))]
                for layer, value in enumerate(ce):
                    if all(value < before["ce"][layer] for before in history):
                        for best, now in zip(kept, readouts.parameters(), strict=True):
                            best[layer] = now.detach()[layer]
                history.append({"step": step, "ce": ce})
                bar.set_postfix_str("held-out ce " + " ".join(f"{value:.2f}" for value in ce))
            if step == steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            rows = batch(step)
            optimizer.zero_grad()
            for layer, states in enumerate(rows.states):  # one layer's logits at a time
                for part, label in zip(states.split(ROWS_AT_ONCE), rows.label.split(ROWS_AT_ONCE), strict=True):
                    loss = F.cross_entropy(readouts(layer, part, head), label, reduction="sum")
                    (loss / len(rows.label)).backward()
            optimizer.step()
    with torch.no_grad():
        for best, now in zip(kept, readouts.parameters(), strict=True):
            now.copy_(best)
    return history


@torch.no_grad()
def cross_entropy(readouts: Readouts, layer: int, head: Tensor, rows: Rows) -> float:
    """Mean over ``rows`` of layer ``layer``, from 0."""
    parts = zip(rows.states[layer].split(ROWS_AT_ONCE), rows.label.split(ROWS_AT_ONCE), strict=True)
    total = sum(float(F.cross_entropy(readouts(layer, part, head), label, reduction="sum")) for part, label in parts)
    return total / max(1, len(rows.label))


@torch.no_grad()
def right_by_position(readouts: Readouts, head: Tensor, rows: Rows, proposals: int) -> dict[str, np.ndarray]:
    """How many first choices are right at the positions 1 .. M = ``proposals``, [M] each: by layer ("1" .. "L"), of
    the draft's own outputs, and how many there are ("count")."""

    def by_position(flags: Tensor) -> np.ndarray:
        return torch.zeros(proposals).index_add(0, rows.slot.cpu() - 1, flags.cpu().float()).numpy()

    found = {"count": by_position(torch.ones_like(rows.slot))}
    for layer, states in enumerate(rows.states):
        parts = [readouts(layer, part, head).argmax(dim=1) for part in states.split(ROWS_AT_ONCE)]
        found[str(layer + 1)] = by_position(torch.cat(parts) == rows.label)
    return found | {name: by_position(choice == rows.label) for name, choice in rows.own.items()}
