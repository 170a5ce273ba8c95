"""The backbone's distillation over the full vocabulary, and its gradient in the same pass (§5).

With logits s = E·h, q = softmax(s), teacher p, label y, per supervised position of weight w:

    loss        w (α CE + (1−α) ℓ1),       CE = −log q_y,  ℓ1 = Σ_v |q_v − p_v|
    d loss / ds w (α (q − 1_y) + (1−α) q ⊙ (σ − ⟨q, σ⟩)),  σ = sign(q − p)
                = q ⊙ (w (1−α) σ + w (α − (1−α) ⟨q, σ⟩)) − α w 1_y
    d loss / dh = Eᵀ (d loss / ds)

The head is frozen, so the gradient by h is all that the backward pass needs. ``distill`` computes it while the
logits exist and keeps [n, H]: no [n, V] tensor outlives its chunk, and none is computed twice.
``distill_by_autograd`` is the reference by automatic differentiation, for conformance and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.modeling.injection import at_least_float32
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.refinement import Candidates, choose_candidates
from specforge_dspine.objective.supervision import MicroBatch


@torch.no_grad()
def teacher_distribution(head: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
    """p = softmax(E · final state) [n, V] of the states ``index`` [n] in ``teacher`` [R·S, H]."""
    needed, inverse = index.unique(return_inverse=True)  # blocks overlap: one p serves several positions
    return F.linear(teacher[needed], head).to(at_least_float32(head.dtype)).softmax(dim=-1)[inverse]


class DistillationTerms(NamedTuple):
    """The backbone's terms of n positions; only ``loss`` carries a gradient."""

    loss: Tensor  # Σ w (α CE + (1−α) ℓ1), a scalar
    ce: Tensor  # [n]
    l1: Tensor  # [n], 0 without teacher
    correct: Tensor  # [n], bool: the argmax is the label
    candidates: Candidates | None  # None without refinement


class Supervision(NamedTuple):
    """What n positions are compared with."""

    label: Tensor  # y [n]
    weight: Tensor  # w [n]
    p: Tensor | None  # the teacher's [n, V]; None where α = 1
    chosen: Tensor | None = None  # candidates [n, K] instead of the top K (conformance only)


# (hidden norm(h_L) [n, H], head E [V, H], supervision, settings)
Distill = Callable[[Tensor, Tensor, Supervision, DSpineSettings], DistillationTerms]


class _LossWithGradient(torch.autograd.Function):
    """A scalar whose gradient by ``hidden`` [n, H] was computed along with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None


def distill(hidden: Tensor, head: Tensor, given: Supervision, settings: DSpineSettings) -> DistillationTerms:
    """Loss and gradient of n positions in one pass over at most three tensors [n, V]; ``given.p`` is overwritten.

    ``hidden`` is norm(h_L) [n, H], ``head`` the frozen E [V, H].
    """
    (label, weight, p, chosen), alpha = given, settings.ce_weight
    y = label.unsqueeze(-1)
    with torch.no_grad():
        logits = F.linear(hidden, head).to(at_least_float32(head.dtype))
        candidates = choose_candidates(logits, p, settings.top_k, chosen) if settings.refinement else None
        best = logits.argmax(dim=-1) if candidates is None or chosen is not None else candidates.ids[:, 0]
        log_q = logits.log_softmax(dim=-1)
        del logits
        ce = -log_q.gather(-1, y).squeeze(-1)
        q = log_q.exp_()
        w = weight.to(q.dtype).unsqueeze(-1)
        if p is None:
            l1 = torch.zeros_like(ce)
            gradient = q.mul_(w * alpha)
        else:
            difference = torch.sub(q, p, out=p)
            l1 = torch.linalg.vector_norm(difference, ord=1, dim=-1)
            sign = difference.sign_()
            mean = torch.einsum("nv,nv->n", q, sign).unsqueeze(-1)
            gradient = sign.mul_(w * (1 - alpha)).add_(w * (alpha - (1 - alpha) * mean)).mul_(q)
        gradient.scatter_add_(-1, y, -alpha * w)
        loss = (w.squeeze(-1) * (alpha * ce + (1 - alpha) * l1)).sum()
        by_hidden = gradient.to(head.dtype) @ head if hidden.requires_grad else hidden
    return DistillationTerms(_LossWithGradient.apply(hidden, loss, by_hidden), ce, l1, best == label, candidates)


def distill_by_autograd(
    hidden: Tensor, head: Tensor, given: Supervision, settings: DSpineSettings
) -> DistillationTerms:
    """``distill`` by automatic differentiation: the formula of the loss alone."""
    label, weight, p, chosen = given
    logits = F.linear(hidden, head).to(at_least_float32(head.dtype))
    log_q = logits.log_softmax(dim=-1)
    ce = -log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    l1 = torch.zeros_like(ce) if p is None else (log_q.exp() - p).abs().sum(dim=-1)
    loss = (weight.to(ce.dtype) * (settings.ce_weight * ce + (1 - settings.ce_weight) * l1)).sum()
    candidates = choose_candidates(logits, p, settings.top_k, chosen) if settings.refinement else None
    return DistillationTerms(loss, ce.detach(), l1.detach(), logits.argmax(dim=-1) == label, candidates)


def backbone_sums(
    batch: MicroBatch, distill: Distill, chosen: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor, Candidates | None]:
    """Returns the backbone's sums over n positions, which argmaxes are right [n], and the candidates.

    Of the sums, "backbone" alone backpropagates. ``chosen`` [n, K] as in ``Supervision``.
    """
    positions, settings = batch.positions, batch.draft.settings
    size, parts = batch.chunk or len(positions.label), []
    for number, hidden in enumerate(batch.hidden.split(size)):
        part = slice(number * size, number * size + len(hidden))
        p = None
        if settings.ce_weight < 1:
            p = teacher_distribution(batch.head, batch.teacher, batch.teacher_index[part])
        picked = None if chosen is None else chosen[part]
        given = Supervision(positions.label[part], positions.weight[part], p, picked)
        parts.append(distill(hidden, batch.head, given, settings))
    ce, l1, correct = (torch.cat([getattr(terms, name) for terms in parts]) for name in ("ce", "l1", "correct"))
    w = positions.weight.to(ce.dtype)
    candidates, mass = None, w.new_zeros(())
    if settings.refinement:
        columns = zip(*(terms.candidates for terms in parts if terms.candidates is not None), strict=True)
        candidates = Candidates(*map(torch.cat, columns))
        mass = (w * candidates.mass).sum()
    loss = torch.stack([terms.loss for terms in parts]).sum()
    sums = {"backbone": loss, "ce": (w * ce).sum(), "l1": (w * l1).sum(), "weight": w.sum(), "mass": mass}
    return sums, correct, candidates
