"""The loss of a micro-batch, normalized from its sums over supervised positions (§5).

With W, W_c, W_m the weights of all, the covered and the heavy positions:

    L_bb  = (α ΣwCE + (1−α) Σwℓ1) / W
    L_ref = α ΣwCE_r / W_c + (1−α) Σwℓ1_r / W_m      ("separate"; "shared" divides by W instead)
    L     = L_bb + L_ref + λ ΣwAlign / W

It travels as numerator and denominator, (W·L, W), which SpecForge sums over micro-batches and ranks. With
``normalization_scope: window``, W, W_c and W_m of L_ref are the optimizer window's: then Σ W·L / Σ W does not depend
on how the window is split. ``look_ahead`` sums a window before its first loss is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from specforge.core.chunking import checkpointed_chunk_reduce
from torch import Tensor

from specforge_dspine.modeling.injection import at_least_float32
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.alignment_gate import gate_ce
from specforge_dspine.objective.distillation import teacher_distribution
from specforge_dspine.objective.metrics import Part, loss_parts
from specforge_dspine.objective.refinement import choose_candidates
from specforge_dspine.objective.supervision import MicroBatch, weighted_mean

WindowReduce = Callable[[Tensor], Tensor]
"""(ΣwCE, W, W_c, W_m) [4] of a micro-batch → of its optimizer window over all ranks."""


def identity(contribution: Tensor) -> Tensor:
    """The ``WindowReduce`` of a micro-batch that is its whole window."""
    return contribution


class LossTerms(NamedTuple):
    """``numerator`` = W·L and ``denominator`` = W (scalars); ``parts`` to log: name → (sum, count), detached."""

    numerator: Tensor
    denominator: Tensor
    parts: dict[str, Part]


def window_contribution(sums: dict[str, Tensor]) -> Tensor:
    """(ΣwCE, W, W_c, W_m) [4] of a micro-batch, detached."""
    return torch.stack([sums[name] for name in ("ce", "weight", "covered", "heavy")]).detach()


def normalize(
    sums: dict[str, Tensor],
    settings: DSpineSettings,
    normalization: str,
    scope: str,
    beta: float,
    window_reduce: WindowReduce,
) -> LossTerms:
    """Returns W·L and W from ``sums``: the backbone's, the refinement's (scalars) and "align" [L]."""
    alpha = settings.ce_weight
    contribution = window_contribution(sums)
    window = window_reduce(contribution)
    gate = gate_ce(window)
    _, weight, covered, heavy = window if scope == "window" else contribution
    if normalization == "shared":
        covered = heavy = weight
    refinement = alpha * weighted_mean(sums["refined_ce"], covered)
    refinement = refinement + (1 - alpha) * weighted_mean(sums["refined_l1"], heavy)
    numerator = sums["backbone"] + weight * refinement + beta * gate * sums["align"].sum()
    return LossTerms(numerator, sums["weight"], loss_parts(sums, settings, gate, beta))


@torch.no_grad()
def look_ahead(batch: MicroBatch, *, weights: bool) -> Tensor:
    """Returns (ΣwCE, W, W_c, W_m) [4] of a micro-batch; W_c and W_m are 0 unless ``weights`` asks for them."""
    head, settings, positions = batch.head, batch.draft.settings, batch.positions

    def sums(hidden: Tensor, teacher: Tensor, weight: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, head).to(at_least_float32(head.dtype))
        w = weight.to(logits.dtype)
        ce = F.cross_entropy(logits, label, reduction="none")
        covered, heavy = torch.zeros_like(ce), torch.zeros_like(ce)
        if weights and settings.refinement:
            p = teacher_distribution(head, batch.teacher, teacher) if settings.ce_weight < 1 else None
            c = choose_candidates(logits, p, settings.top_k)
            covered = (c.ids == label.unsqueeze(-1)).any(dim=-1).to(w.dtype)
            heavy = (c.mass > settings.candidate_mass_threshold).to(w.dtype)
        return (torch.stack([(w * ce).sum(), w.sum(), (w * covered).sum(), (w * heavy).sum()]),)

    columns = (batch.hidden, batch.teacher_index, positions.weight, positions.label)
    (total,) = checkpointed_chunk_reduce(sums, *columns, chunk_size=batch.chunk)
    return total
