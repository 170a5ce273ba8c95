"""Predecessor-conditioned decoding (§6): candidates, last-write refinement, transition cache, walks.

    V_t = top K of E · norm(h_{L,t}), ids that the target never emits removed first
    S_t(s, v) = E_v · norm(last write on u_{L,t} with predecessor √r · C_s)
    T_t[i, j] = S_t(v_{t−1,i}, v_{t,j});   T_1[·, j] = S_1(x_0, v_{1,j})

The predecessor of slot t can only be one of K candidates, so the whole cache comes from one batched
refinement, in float32, and the walk is a look-up: token-identical to refining position by position, which
``stepwise`` does. A draft without refinement walks over the backbone's own logits, the same for every predecessor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.decoding.sampling import Sampling, distribution, draw
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineSettings

Pick = Callable[[Tensor], Tensor]
"""Chooses an index [..] from a row of scores [.., K]."""


class Proposal(NamedTuple):
    """Proposed ``tokens`` [.., M] out of the candidates ``ids`` [.., M, K]; ``q`` [.., M, K] is what each was drawn
    from, None where the best was taken."""

    tokens: Tensor
    ids: Tensor
    q: Tensor | None


def never_emitted(settings: DSpineSettings, mask_token_id: int, vocab: int, device: torch.device) -> Tensor:
    """Ids excluded before the top K [V] (bool): padded rows, the mask id and the other excluded ids."""
    excluded = torch.zeros(vocab, dtype=torch.bool, device=device)
    excluded[settings.valid_vocab_size or vocab :] = True
    excluded[[mask_token_id, *settings.excluded_ids]] = True
    return excluded


def candidates(head: Tensor, hidden: Tensor, excluded: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top K of the backbone: ``hidden`` norm(h_L) [.., M, H] → ids [.., M, K] and logits [.., M, K], float32 up.

    ``head`` E [V, H], ``excluded`` [V] (bool). Best first, of equal ones the lower id; which of several equal ones is
    the last candidate is the device's choice.
    """
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), head)  # one matrix product, not one per block
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(excluded, -torch.inf)
    values, ids = (best.reshape(*hidden.shape[:-1], k) for best in logits.topk(k, dim=-1))
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values


def transition_cache(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, ids: Tensor, anchor: Tensor
) -> Tensor:
    """All scores T [.., M, K, K] at once; row i of slot 1 is the anchor for every i.

    ``pre_injection`` u_L [.., M, H], ``ids`` candidates [.., M, K], ``anchor`` x_0 [..]. Row: predecessor
    candidate i of slot t−1; column: candidate j of slot t. Computed in float32 or wider.
    """
    k = ids.shape[-1]
    first = anchor[..., None, None].expand(*ids.shape[:-2], 1, k)
    predecessors = torch.cat([first, ids[..., :-1, :]], dim=-2)  # [.., M, K]
    wide = pre_injection.to(torch.promote_types(pre_injection.dtype, torch.float32))
    refined = draft.refine(wide.unsqueeze(-2), predecessors)  # [.., M, K, H]
    return torch.einsum("...ih,...jh->...ij", refined, head[ids].to(refined.dtype))


def follow(scores: Tensor, pick: Pick) -> Tensor:
    """Candidate indices [.., M] of the path through ``scores`` [.., M, K, K] on which ``pick`` chooses every step."""
    index = torch.zeros(scores.shape[:-3], dtype=torch.long, device=scores.device)
    path = []
    for slot in scores.unbind(dim=-3):
        row = slot.gather(-2, index[..., None, None].expand(*index.shape, 1, slot.shape[-1])).squeeze(-2)
        index = pick(row)
        path.append(index)
    return torch.stack(path, dim=-1)


def greedy_walk(scores: Tensor) -> Tensor:
    """Candidate indices [.., M] of the greedy path through ``scores`` [.., M, K, K]; ties go to the lowest."""
    return follow(scores, best)


def sampled_walk(scores: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A drawn path [.., M] through ``scores`` [.., M, K, K], and what each step was drawn from [.., M, K]."""
    pick = Drawing(sampling, generator)
    path = follow(scores, pick)
    return path, torch.stack(pick.met, dim=-2)


def best(row: Tensor) -> Tensor:
    """The best index [..] of ``row`` [.., K]; ties go to the lowest."""
    return row.argmax(dim=-1)


class Drawing:
    """A ``Pick`` that draws, and keeps in ``met`` the distributions [.., K] that it drew from."""

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        self.sampling, self.generator = sampling, generator
        self.met: list[Tensor] = []

    def __call__(self, row: Tensor) -> Tensor:
        self.met.append(distribution(row, self.sampling))
        return draw(self.met[-1], self.generator)


def stepwise(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, ids: Tensor, anchor: Tensor, pick: Pick
) -> tuple[Tensor, Tensor]:
    """The slow twin of cache and walk: refine slot t once its predecessor is chosen, choose, go on.

    Arguments as for ``transition_cache``, in the dtype of ``pre_injection``. Returns the path [.., M] and the
    rows of scores [.., M, K] that were met.
    """
    previous, path, rows = anchor, [], []
    for state, options in zip(pre_injection.unbind(dim=-2), ids.unbind(dim=-2), strict=True):
        refined = draft.refine(state, previous)  # [.., H]
        row = torch.einsum("...h,...kh->...k", refined, head[options].to(refined.dtype))
        index = pick(row)
        previous = options.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        path.append(index)
        rows.append(row)
    return torch.stack(path, dim=-1), torch.stack(rows, dim=-2)


def path_probabilities(scores: Tensor, path: Tensor, temperature: float) -> Tensor:
    """The proposal distributions [.., M, K] met along ``path`` [.., M]: softmax(row / temperature) by slot."""
    rows = torch.cat([torch.zeros_like(path[..., :1]), path[..., :-1]], dim=-1)
    met = scores.gather(-2, rows[..., None, None].expand(*rows.shape, 1, scores.shape[-1])).squeeze(-2)
    return (met / temperature).softmax(dim=-1)


def propose(
    draft: DSpineDraftModel,
    head: Tensor,
    hidden: Tensor,
    pre_injection: Tensor,
    anchor: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    *,
    refine: bool,
) -> Proposal:
    """Proposals of every block, by walking over refined scores or over the backbone's own logits.

    ``hidden``, ``pre_injection`` [.., B, H] as the draft's forward returns them; ``anchor`` x_0 [..].
    """
    excluded = never_emitted(draft.settings, draft.mask_token_id, len(head), head.device)
    ids, logits = candidates(head, hidden[..., 1:, :], excluded, draft.settings.top_k)
    if refine:
        scores = transition_cache(draft, head, pre_injection[..., 1:, :], ids, anchor)
    else:
        scores = logits.unsqueeze(-2).expand(*ids.shape, ids.shape[-1])  # every predecessor's row
    return walk(scores, ids, sampling, generator)


def walk(scores: Tensor, ids: Tensor, sampling: Sampling, generator: torch.Generator) -> Proposal:
    """The proposal of the walk through ``scores`` [.., M, K, K] over candidates ``ids`` [.., M, K]."""
    path, q = (greedy_walk(scores), None) if sampling.greedy else sampled_walk(scores, sampling, generator)
    return Proposal(ids.gather(-1, path.unsqueeze(-1)).squeeze(-1), ids, q)
