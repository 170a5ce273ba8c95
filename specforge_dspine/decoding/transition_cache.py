"""The transition cache (§6): all refined scores of a block at once, and the walk through them.

    T_t[i, j] = S_t(v_{t−1,i}, v_{t,j});   T_1[·, j] = S_1(x_0, v_{1,j})

The predecessor of slot t can only be one of K candidates, so one batched refinement gives every score that a walk
can meet, and the walk is a look-up. It chooses the same tokens as ``refine_sequentially``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_dspine.decoding.last_write_refinement import refined_scores
from specforge_dspine.decoding.sampling import Sampling, choose
from specforge_dspine.modeling.draft_model import DSpineDraftModel


def transition_cache(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, ids: Tensor, anchor: Tensor
) -> Tensor:
    """Returns the scores T [.., M, K, K], in float32 or wider; every row of slot 1 is the anchor's.

    ``head`` E [V, H], ``pre_injection`` u_L [.., M, H], candidates ``ids`` [.., M, K], ``anchor`` x_0 [..]. A row is
    the predecessor's candidate of slot t−1, a column the candidate of slot t.
    """
    first = anchor[..., None, None].expand(*ids.shape[:-2], 1, ids.shape[-1])
    predecessors = torch.cat([first, ids[..., :-1, :]], dim=-2)  # [.., M, K]
    states = pre_injection.to(torch.promote_types(pre_injection.dtype, torch.float32))
    return refined_scores(draft, head, states, predecessors, ids)


def walk(
    scores: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor | None]:
    """Choose a candidate per slot, from left to right, through ``scores`` [.., M, K, K].

    Returns the candidates' indices [.., M], and the distributions [.., M, K] they came from (greedy: None).
    """
    index = torch.zeros(scores.shape[:-3], dtype=torch.long, device=scores.device)
    path, distributions = [], []
    for slot in scores.unbind(dim=-3):
        row = slot.gather(-2, index[..., None, None].expand(*index.shape, 1, slot.shape[-1])).squeeze(-2)
        index, q = choose(row, sampling, generator)
        path.append(index)
        distributions += [] if q is None else [q]
    return torch.stack(path, dim=-1), torch.stack(distributions, dim=-2) if distributions else None


def path_probabilities(scores: Tensor, path: Tensor, temperature: float) -> Tensor:
    """Returns softmax(row / temperature) [.., M, K] of the rows of ``scores`` that ``path`` [.., M] leads to."""
    rows = torch.cat([torch.zeros_like(path[..., :1]), path[..., :-1]], dim=-1)
    on_path = scores.gather(-2, rows[..., None, None].expand(*rows.shape, 1, scores.shape[-1])).squeeze(-2)
    return (on_path / temperature).softmax(dim=-1)
