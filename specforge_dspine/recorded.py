"""Recorded answers: where they lie in a captured record, and whether they may be replayed.

Greedy verification accepts exactly the target's greedy answer, so an answer that is recorded with the states over it
gives every round of decoding without the target. That holds for no other answer, and the record can tell: each token
has to be the best by the LM head on the final state before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_ONCE = 256  # of logits over the vocabulary
GREEDY_SLACK = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""How far below the best logit, relative to it, a server's greedy choice may lie: its sums round in another order."""


def answer_span(loss_mask: Tensor, name: str) -> tuple[int, int]:
    """Where the answer of a captured record lies: the one run of 1 in its mask [S], prompt before it.

    Raises:
        ValueError: there is no such run, or several.
    """
    edges = F.pad(loss_mask.ne(0).int(), (1, 1)).diff().nonzero().flatten().tolist()
    if len(edges) != 2 or edges[0] == 0:
        raise ValueError(
            f"{name}: its loss mask has {len(edges) // 2} runs, from the places {edges[::2]} on; a captured answer "
            "follows a prompt in one run. Evaluate such conversations as prompts=FILE"
        )
    return edges[0], edges[1]


def check_greedy(final: Tensor, head: Tensor, answer: Tensor, name: str) -> None:
    """A replay is only true of the target's own greedy ``answer`` [n]: each token's logit, of the states ``final``
    [n, H] before it, has to be the best but for rounding.

    Raises:
        ValueError: a token is not.
    """
    for at in range(0, len(answer), ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        logits = F.linear(final[part].to(head.dtype), head).float()
        best = logits.amax(dim=-1)
        below = best - logits.gather(-1, answer[part, None]).squeeze(-1)
        allowed = GREEDY_SLACK[head.dtype] * best.abs().clamp_min(1)
        if (below > allowed).any():
            worst = int((below - allowed).argmax())
            raise ValueError(
                f"{name}: token {at + worst} of the answer is not the target's greedy choice (its logit lies "
                f"{float(below[worst]):.3g} below the best): answers drawn at a temperature, or by somebody else, "
                "cannot be replayed. Evaluate their prompts=FILE, or capture the target's greedy answers"
            )
