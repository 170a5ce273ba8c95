"""The refinement's distillation (§5): its loss terms over K candidates, after the last-write refinement of §6.2.

Per supervised position with label y, correct predecessor s and candidates c, the backbone's top K:

    q̃ = softmax(E_c · refine(u_L, s))     p̃ = p_c / Σ p_c
    CE_r = −log q̃(y)                      where y is a candidate: the position is "covered"
    ℓ1_r = ‖q̃ − p̃‖₁                       where Σ p_c exceeds the mass threshold: it is "heavy"

The candidates are detached, and the label is not inserted. u_L is not detached: the refinement trains the backbone
too. ``refine`` is ``DSpineDraftModel.refine``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from specforge.core.chunking import checkpointed_chunk_reduce
from torch import Tensor

from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.injection import at_least_float32
from specforge_dspine.objective.supervision import MicroBatch


class Candidates(NamedTuple):
    """The K candidates of n positions: ``ids`` [n, K], teacher ``p`` = p̃ [n, K], and the teacher's ``mass`` [n]."""

    ids: Tensor
    p: Tensor
    mass: Tensor


@torch.no_grad()
def choose_candidates(logits: Tensor, p: Tensor | None, k: int, chosen: Tensor | None = None) -> Candidates:
    """Top K of ``logits`` [n, V]; ``chosen`` [n, K] overrides them.

    ``p`` [n, V] is the teacher's; None where nothing of the loss needs it: p̃ and mass are then 0.
    """
    ids = logits.topk(k, dim=-1).indices if chosen is None else chosen
    of_teacher = torch.zeros_like(ids, dtype=logits.dtype) if p is None else p.gather(-1, ids)
    mass = of_teacher.sum(dim=-1)
    return Candidates(ids, of_teacher / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1), mass)


class RefinementTerms(NamedTuple):
    """Terms of n positions, each [n]; the last three carry no gradient."""

    ce: Tensor  # 0 where the label is no candidate
    l1: Tensor  # 0 where the candidates' teacher mass is at most the threshold
    covered: Tensor  # bool: the label is a candidate
    heavy: Tensor  # bool: mass > threshold
    correct: Tensor  # bool: the refinement's best candidate is the label


def refinement_terms(
    draft: DSpineDraftModel, head: Tensor, pre_injection: Tensor, label: Tensor, predecessor: Tensor, c: Candidates
) -> RefinementTerms:
    """Compare q̃ with the label and p̃: ``head`` E [V, H], ``pre_injection`` u_L [n, H], ids [n]."""
    refined = draft.refine(pre_injection, predecessor)
    scores = torch.einsum("nh,nkh->nk", refined, head[c.ids]).to(at_least_float32(head.dtype))
    log_q = scores.log_softmax(dim=-1)
    is_label, heavy = c.ids == label.unsqueeze(-1), c.mass > draft.settings.candidate_mass_threshold
    return RefinementTerms(
        ce=-(log_q * is_label).sum(dim=-1),
        l1=(log_q.exp() - c.p).abs().sum(dim=-1) * heavy,
        covered=is_label.any(dim=-1),
        heavy=heavy,
        correct=is_label.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1),
    )


REFINEMENT_SUMS = ("refined_ce", "refined_l1", "covered", "heavy")


def refinement_sums(batch: MicroBatch, candidates: Candidates | None) -> tuple[dict[str, Tensor], Tensor]:
    """Returns Σ w · term of what ``REFINEMENT_SUMS`` names, and which refined choices are right [n].

    Recomputed in the backward pass, chunk by chunk. Without ``candidates`` (no refinement) all of it is 0.
    """
    draft, head, positions = batch.draft, batch.head, batch.positions
    wide = at_least_float32(head.dtype)
    wrong = torch.zeros(len(positions.label), dtype=torch.bool, device=head.device)
    if candidates is None:
        return dict.fromkeys(REFINEMENT_SUMS, torch.zeros((), dtype=wide, device=head.device)), wrong

    def sums(
        state: Tensor, weight: Tensor, label: Tensor, predecessor: Tensor, index: Tensor, *c: Tensor
    ) -> tuple[Tensor, ...]:
        terms = refinement_terms(draft, head, state, label, predecessor, Candidates(*c))
        w = weight.to(wide)
        weighted = tuple((w * value).sum() for value in (terms.ce, terms.l1, terms.covered, terms.heavy))
        return (*weighted, wrong.index_put((index,), terms.correct))

    index = torch.arange(len(positions.label), device=head.device)
    columns = (batch.pre_injection, positions.weight, positions.label, positions.predecessor, index)
    *values, correct = checkpointed_chunk_reduce(sums, *columns, *candidates, chunk_size=batch.chunk)
    return dict(zip(REFINEMENT_SUMS, values, strict=True)), correct
