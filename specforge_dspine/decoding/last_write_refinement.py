"""Last-write refinement (§6): candidate scores given the predecessor token.

    S_t(s, v) = E_v · norm(last injection redone on u_{L,t} with predecessor √r · C_s)

The model's part is ``DSpineDraftModel.refine``. ``refine_sequentially`` is the sequential reference implementation
of decoding; the transition cache has to choose the same tokens.
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
    for ``transition_cache`` and ``walk``; computes in the dtype of ``pre_injection``.
    """
    previous, path, rows = anchor, [], []
    for state, options in zip(pre_injection.unbind(dim=-2), ids.unbind(dim=-2), strict=True):
        row = refined_scores(draft, head, state, previous.unsqueeze(-1), options).squeeze(-2)
        index = choose(row, sampling, generator)[0]
        previous = options.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        path.append(index)
        rows.append(row)
    return torch.stack(path, dim=-1), torch.stack(rows, dim=-2)
