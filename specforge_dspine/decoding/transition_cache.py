"""The transition cache (§6.3): all last-write refinements (§6.2) that a walk through a block can meet, at once.

    S_t(s, v) = E_v · norm(last injection redone on u_{L,t} with predecessor √r · C_s)
    T_t[i, j] = S_t(v_{t−1,i}, v_{t,j});   T_1[·, j] = S_1(x_0, v_{1,j})

The predecessor of slot t can only be one of K candidates, so one batched refinement gives every score, and the walk
is a look-up. It chooses the same tokens as ``refine_sequentially``, the sequential reference implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_dspine.decoding.sampling import Sampling, choose
from specforge_dspine.modeling.draft_model import DSpineDraftModel


def refined_scores(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, predecessors: Tensor, ids: Tensor
) -> Tensor:
    """Returns the scores S_t [.., P, K] of the candidates ``ids`` [.., K] after each of ``predecessors`` [.., P].

    ``head`` E [V, H], ``pre_injection`` u_{L,t} [.., H]; in the dtype of ``pre_injection``.
    """
    refined = draft.refine(pre_injection.unsqueeze(-2), predecessors)  # [.., P, H]
    return torch.einsum("...ih,...jh->...ij", refined, head[ids].to(refined.dtype))


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


def refine_sequentially(
    draft: DSpineDraftModel,
    head: Tensor,
    pre_injection: Tensor,
    ids: Tensor,
    anchor: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Refine slot t once its predecessor is chosen, choose, and go on to the next slot.

    Returns the chosen candidates' indices [.., M], and the scores [.., M, K] that they were chosen from. Arguments as
    for ``transition_cache`` and ``proposal.walk``; computes in the dtype of ``pre_injection``.
    """
    previous, path, rows = anchor, [], []
    for state, options in zip(pre_injection.unbind(dim=-2), ids.unbind(dim=-2), strict=True):
        row = refined_scores(draft, head, state, previous.unsqueeze(-1), options).squeeze(-2)
        index = choose(row, sampling, generator)[0]
        previous = options.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        path.append(index)
        rows.append(row)
    return torch.stack(path, dim=-1), torch.stack(rows, dim=-2)


def path_probabilities(scores: Tensor, path: Tensor, temperature: float) -> Tensor:
    """Returns softmax(row / temperature) [.., M, K] of the rows of ``scores`` that ``path`` [.., M] leads to."""
    rows = torch.cat([torch.zeros_like(path[..., :1]), path[..., :-1]], dim=-1)
    on_path = torch.take_along_dim(scores, rows[..., None, None], dim=-2).squeeze(-2)
    return (on_path / temperature).softmax(dim=-1)
