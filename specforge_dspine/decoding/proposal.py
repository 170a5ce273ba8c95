"""Proposals of a block: candidates, their scores, and the walk that chooses among them (§6).

A draft without refinement walks over the backbone's own logits, which are the same for every predecessor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specforge_dspine.decoding.candidates import candidates, excluded_mask
from specforge_dspine.decoding.sampling import Sampling
from specforge_dspine.decoding.transition_cache import transition_cache, walk
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
    """Propose M tokens per block; with ``refine`` False by the backbone's logits.

    ``head`` E [V, H]; ``hidden``, ``pre_injection`` [.., B, H] as the draft's forward returns them; ``anchor`` [..].
    """
    excluded = excluded_mask(draft.settings, draft.mask_token_id, len(head), head.device)
    ids, logits = candidates(head, hidden[..., 1:, :], excluded, draft.settings.top_k)
    if refine:
        scores = transition_cache(draft, head, pre_injection[..., 1:, :], ids, anchor)
    else:
        scores = logits.unsqueeze(-2).expand(*ids.shape, ids.shape[-1])  # every predecessor's row
    return propose_by_walk(scores, ids, sampling, generator)


def propose_by_walk(
    scores: Tensor, ids: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Proposal:
    """Propose the tokens of the walk through ``scores`` [.., M, K, K] over candidates ``ids`` [.., M, K]."""
    path, q = walk(scores, sampling, generator)
    return Proposal(ids.gather(-1, path.unsqueeze(-1)).squeeze(-1), ids, q)
