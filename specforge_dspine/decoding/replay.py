"""Replay of captured responses: the rounds of greedy decoding without running the target.

Greedy verification accepts exactly the target's greedy response. With that response and the target's features over
it, the blocks at all anchors can be drafted in a few forwards, and every round is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.decoding.drafter import BlockDrafter, draft_all_anchors
from specforge_dspine.decoding.loop import Round, Trace

BLOCKS_PER_FORWARD = 64
POSITIONS_PER_CHUNK = 256  # of logits over the vocabulary
GREEDY_SLACK = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""How far below the best logit, relative to it, a server's greedy choice may lie: its sums round in another order."""


def response_span(loss_mask: Tensor, name: str) -> tuple[int, int]:
    """Returns where a captured record's response begins and ends: the one run of 1 in its mask [S].

    Raises:
        ValueError: the mask has no run, several, or one without a prompt before it.
    """
    edges = F.pad(loss_mask.ne(0).int(), (1, 1)).diff().nonzero().flatten().tolist()
    if len(edges) != 2 or edges[0] == 0:
        raise ValueError(
            f"{name}: its loss mask has {len(edges) // 2} runs, from the positions {edges[::2]} on; a captured "
            "response follows a prompt in one run. Evaluate such conversations as prompts=FILE"
        )
    return edges[0], edges[1]


def check_greedy(final: Tensor, head: Tensor, response: Tensor, name: str) -> None:
    """Check that ``response`` [n] is the target's greedy one; only such a response can be replayed.

    ``final`` [n, H] are the target's final states before each token, ``head`` is E [V, H].

    Raises:
        ValueError: a token's logit is not the best, by more than rounding.
    """
    for at in range(0, len(response), POSITIONS_PER_CHUNK):
        part = slice(at, at + POSITIONS_PER_CHUNK)
        logits = F.linear(final[part].to(head.dtype), head).float()
        best = logits.amax(dim=-1)
        below = best - logits.gather(-1, response[part, None]).squeeze(-1)
        allowed = GREEDY_SLACK[head.dtype] * best.abs().clamp_min(1)
        if (below > allowed).any():
            worst = int((below - allowed).argmax())
            raise ValueError(
                f"{name}: token {at + worst} of the response is not the target's greedy choice (its logit lies "
                f"{float(below[worst]):.3g} below the best), so it cannot be replayed. Evaluate its prompt as "
                "prompts=FILE, or capture the target's greedy responses"
            )


def replay(drafter: BlockDrafter, ids: Tensor, taps: Tensor, start: int, name: str) -> Trace:
    """Returns what greedy decoding gives: the response ``ids`` [S] from position ``start`` on, with its rounds.

    ``taps`` [S, T·H] are the target's features.
    """
    anchors = torch.arange(start, len(ids) - 1, device=ids.device)
    chunks = anchors.split(BLOCKS_PER_FORWARD) if len(anchors) else ()
    proposals = [block for part in chunks for block in draft_all_anchors(drafter, ids, taps, part).tokens.tolist()]
    return Trace(name, tuple(ids.tolist()), start, replay_rounds(proposals, ids.tolist(), start))


def replay_rounds(proposals: Sequence[Sequence[int]], ids: Sequence[int], start: int) -> tuple[Round, ...]:
    """Returns the rounds along ``ids`` (S) from ``start`` on, given the ``proposals`` (M each) at every anchor."""
    rounds, anchor = [], start
    while anchor < len(ids) - 1:
        proposed = proposals[anchor - start]
        same = (ours == following for ours, following in zip(proposed, ids[anchor + 1 :], strict=False))
        accepted = sum(takewhile(bool, same))
        rounds.append(Round(anchor, tuple(proposed), accepted))
        anchor += accepted + 1
    return tuple(rounds)
