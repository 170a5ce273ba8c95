"""Distillation over the full vocabulary: the backbone's loss, and its gradient in the same pass (§5).

With logits s = E·h, q = softmax(s), teacher p, label y, for every row of weight w:

    loss        w (α CE + (1−α) ℓ1),       CE = −log q_y,  ℓ1 = Σ_v |q_v − p_v|
    d loss / ds w (α (q − 1_y) + (1−α) q ⊙ (σ − ⟨q, σ⟩)),  σ = sign(q − p)
                = q ⊙ (w (1−α) σ + w (α − (1−α) ⟨q, σ⟩)) − α w 1_y
    d loss / dh = Eᵀ (d loss / ds)

The head is frozen, so a row's gradient by h is all that its backward pass needs: ``distill`` computes it while the
logits exist and keeps [n, H], so that no [n, V] tensor outlives its chunk and none is computed twice.
``distill_by_autograd`` is the same by differentiation: the reference, for conformance and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.modeling.settings import DSpineSettings


def wide(dtype: torch.dtype) -> torch.dtype:
    """Softmaxes are taken in float32, or in ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def teacher_distribution(head: Tensor, teacher: Tensor, position: Tensor) -> Tensor:
    """p = softmax(E · final state) [n, V] of the states number ``position`` [n] in ``teacher`` [R·S, H]."""
    needed, row = position.unique(return_inverse=True)  # blocks overlap: a position's p serves several rows
    return F.linear(teacher[needed], head).to(wide(head.dtype)).softmax(dim=-1)[row]


class Candidates(NamedTuple):
    """The refinement's choice among V, per row: ``ids`` [n, K]; their renormalised teacher p̃ ``p`` [n, K]; their
    teacher ``mass`` [n]."""

    ids: Tensor
    p: Tensor
    mass: Tensor


@torch.no_grad()
def choose_candidates(logits: Tensor, p: Tensor | None, k: int, chosen: Tensor | None = None) -> Candidates:
    """Top K of ``logits`` [n, V], detached, the label not inserted; ``chosen`` [n, K] overrides them.

    ``p`` [n, V] is the teacher's; None where nothing of the loss needs it, and p̃ and mass are 0.
    """
    ids = logits.topk(k, dim=-1).indices if chosen is None else chosen
    of_teacher = torch.zeros_like(ids, dtype=logits.dtype) if p is None else p.gather(-1, ids)
    mass = of_teacher.sum(dim=-1)
    return Candidates(ids, of_teacher / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(-1), mass)


class Distilled(NamedTuple):
    """Of n rows: ``loss`` Σ w (α CE + (1−α) ℓ1), a scalar that backpropagates into the hidden states; without
    gradient ``ce``, ``l1`` (0 without teacher) and ``correct`` (bool: the argmax is the label), [n] each; the
    ``candidates``, None unless asked for."""

    loss: Tensor
    ce: Tensor
    l1: Tensor
    correct: Tensor
    candidates: Candidates | None


# (hidden [n, H], head E [V, H], label [n], weight w [n], teacher p [n, V] or None, settings, chosen [n, K] or None)
Distill = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, DSpineSettings, Tensor | None], Distilled]


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


def distill(
    hidden: Tensor,
    head: Tensor,
    label: Tensor,
    weight: Tensor,
    p: Tensor | None,
    settings: DSpineSettings,
    chosen: Tensor | None = None,
) -> Distilled:
    """Loss and gradient of n rows in one pass over at most three tensors [n, V], of which ``p`` is one: it is
    overwritten.

    ``hidden`` norm(h_L) [n, H], ``head`` E [V, H] frozen, ``label`` y and ``weight`` w [n], ``p`` [n, V] or None
    (then α must be 1), ``chosen`` [n, K] instead of the top K (conformance).
    """
    alpha, y = settings.ce_weight, label.unsqueeze(-1)
    with torch.no_grad():
        logits = F.linear(hidden, head).to(wide(head.dtype))
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
    return Distilled(_LossWithGradient.apply(hidden, loss, by_hidden), ce, l1, best == label, candidates)


def distill_by_autograd(
    hidden: Tensor,
    head: Tensor,
    label: Tensor,
    weight: Tensor,
    p: Tensor | None,
    settings: DSpineSettings,
    chosen: Tensor | None = None,
) -> Distilled:
    """``distill`` by differentiation: the formula of the loss alone."""
    logits = F.linear(hidden, head).to(wide(head.dtype))
    log_q = logits.log_softmax(dim=-1)
    ce = -log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    l1 = torch.zeros_like(ce) if p is None else (log_q.exp() - p).abs().sum(dim=-1)
    loss = (weight.to(ce.dtype) * (settings.ce_weight * ce + (1 - settings.ce_weight) * l1)).sum()
    candidates = choose_candidates(logits, p, settings.top_k, chosen) if settings.refinement else None
    return Distilled(loss, ce.detach(), l1.detach(), logits.argmax(dim=-1) == label, candidates)
