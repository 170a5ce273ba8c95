"""Layer alignment, and the gate λ that weighs it in the loss (§5).

    L_emb = Σ_ℓ Σ w (1 − cos(e_ℓ, C_y)) / W        e_ℓ = f_ℓ(h_ℓ), from the state after injection
    λ = β · stop_grad(ΣwCE / W)                    the backbone's CE over the optimizer window and all ranks
    β = β_max · min(1, step / warm-up steps)       no warm-up: β_max

The variant ``alignment: ce`` takes −log softmax(E · norm(h_ℓ))_y of every layer instead of 1 − cos.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from specforge.core.chunking import checkpointed_chunk_reduce
from torch import Tensor

from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.injection import at_least_float32
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.distillation import Supervision, distill
from specforge_dspine.objective.supervision import MicroBatch, weighted_mean


def alignment_beta(step: int, warmup_steps: int, settings: DSpineSettings) -> float:
    """β at ``step``, the number of optimizer steps already taken; 0 without alignment."""
    if settings.alignment == "off":
        return 0.0
    if warmup_steps == 0:
        return settings.alignment_weight
    return settings.alignment_weight * min(1.0, step / warmup_steps)


def gate_ce(window: Tensor) -> Tensor:
    """stop_grad(ΣwCE / W), what β is multiplied by, from the ``window`` sums (ΣwCE, W, W_c, W_m) [4]."""
    return weighted_mean(window[0], window[1])


def cosine_terms(draft: DSpineDraftModel, features: Tensor, label: Tensor) -> Tensor:
    """1 − cos(e_ℓ, C_y) per layer, [n, L], of ``features`` e [n, L, r]."""
    codes = draft.transfer_codes[label].to(at_least_float32(features.dtype))
    return 1 - F.cosine_similarity(features.to(codes.dtype), codes.unsqueeze(1), dim=-1)


def alignment_sums(batch: MicroBatch) -> Tensor:
    """Σ w · term over n positions, per layer [L]; [0] without alignment. Recomputed in the backward pass, chunked."""
    draft, head, positions = batch.draft, batch.head, batch.positions
    if draft.settings.alignment == "off":
        return torch.zeros(0, dtype=at_least_float32(head.dtype), device=head.device)
    plain_ce = draft.settings.model_copy(update={"ce_weight": 1.0, "refinement": False})

    def sums(features: Tensor, label: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if draft.settings.alignment == "cosine":
            terms = cosine_terms(draft, features, label)
            return ((weight.to(terms.dtype).unsqueeze(-1) * terms).sum(dim=0),)
        # A layer at a time: its logits are freed before the next layer's exist.
        given = Supervision(label, weight, None)
        return (torch.stack([distill(state, head, given, plain_ce).loss for state in features.unbind(dim=1)]),)

    columns = (batch.features, positions.label, positions.weight)
    (total,) = checkpointed_chunk_reduce(sums, *columns, chunk_size=batch.chunk)
    return total
