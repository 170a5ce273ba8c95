"""Proposals of a block (§6): candidates, their scores, and the walk that chooses among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.decoding.sampling import Sampling, choose
from specforge_dspine.decoding.transition_cache import transition_cache
from specforge_dspine.modeling.draft_model import DSpineDraftModel


class Proposal(NamedTuple):
    """Proposed ``tokens`` [.., M], chosen from the candidates ``ids`` [.., M, K].

    ``q`` [.., M, K] are the distributions that they were drawn from; None if greedy.
    """

    tokens: Tensor
    ids: Tensor
    q: Tensor | None


def propose(
    draft: DSpineDraftModel,
    head: Tensor,
    hidden: Tensor,
    pre_injection: Tensor,
    anchor: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    *,
    refine: bool,
) -> Proposal:
    """Propose M tokens per block; with ``refine`` False by the backbone's logits, whatever the predecessor.

    ``head`` E [V, H]; ``hidden``, ``pre_injection`` [.., B, H] as the draft's forward returns them; ``anchor`` [..].
    """
    ids, logits = candidates(draft, head, hidden[..., 1:, :])
    if refine:
        scores = transition_cache(draft, head, pre_injection[..., 1:, :], ids, anchor)
    else:
        scores = logits.unsqueeze(-2).expand(*ids.shape, ids.shape[-1])  # every predecessor's row
    return walk(scores, ids, sampling, generator)


def candidates(draft: DSpineDraftModel, head: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ids [.., M, K] and logits [.., M, K] of the backbone's top K, in float32 or wider.

    ``head`` E [V, H], ``hidden`` norm(h_L) [.., M, H]. The best comes first; of equal logits the lower id. Which of
    several equal ones is the last candidate is the device's choice.
    """
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), head)  # one matrix product, not one per block
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best = logits.masked_fill(excluded_mask(draft, head), -torch.inf).topk(draft.settings.top_k, dim=-1)
    values, ids = (top.reshape(*hidden.shape[:-1], -1) for top in best)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values


def excluded_mask(draft: DSpineDraftModel, head: Tensor) -> Tensor:
    """Returns a mask [V] (bool) of ids that the target never emits: padded rows, the mask id, ``excluded_ids``."""
    excluded = torch.zeros(len(head), dtype=torch.bool, device=head.device)
    excluded[draft.settings.valid_vocab_size or len(head) :] = True
    excluded[[draft.mask_token_id, *draft.settings.excluded_ids]] = True
    return excluded


def walk(scores: Tensor, ids: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Proposal:
    """Choose one of the candidates ``ids`` [.., M, K] per slot, from left to right, through ``scores`` [.., M, K, K].

    A row of ``scores`` is the candidate chosen in the slot before, a column the candidate to choose.
    """
    index = torch.zeros(scores.shape[:-3], dtype=torch.long, device=scores.device)
    path, distributions = [], []
    for slot in scores.unbind(dim=-3):
        row = torch.take_along_dim(slot, index[..., None, None], dim=-2).squeeze(-2)
        index, q = choose(row, sampling, generator)
        path.append(index)
        distributions += [] if q is None else [q]
    tokens = ids.gather(-1, torch.stack(path, dim=-1).unsqueeze(-1)).squeeze(-1)
    return Proposal(tokens, ids, torch.stack(distributions, dim=-2) if distributions else None)
