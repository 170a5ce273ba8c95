"""Adjacent causal injection (§4): every layer passes each position's predicted feature to the next one.

With u_t the state of slot t after draft layer ℓ and z_t = f_ℓ(u_t) = √r · normalize(R_ℓ u_t), for t = 1..M:

    g_t = σ(G_q z_t + G_p z_{t−1} + b)          [a]
    m_t = A z_{t−1}                             [a]
    h_t = u_t + RMS(u_t) · W_ℓ (g_t ⊙ m_t)      [H],   RMS(u) = ‖u‖ / √H

All slots read pre-injection features. Slot 0, the anchor, is unchanged, and slot 1's predecessor is the anchor's code
√r · C_{x_0}, never f_ℓ(u_0). W_ℓ = 0 at the start: the first forward is a block-causal DFlash. Redoing the last
layer's ``write`` with a known predecessor is the last-write refinement (§6.2), ``DSpineDraftModel.refine``.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specforge_dspine.modeling.transfer_space import FLOOR


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """What softmaxes and norms are computed in: float32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """``layer`` [out, in] on x [.., in] in x's dtype: float32 states (decoding) keep their precision.

    Under FSDP the weight is a plain tensor while the forward runs, so it is read as an attribute.
    """
    return F.linear(x, cast(Tensor, layer.weight).to(x.dtype))


class LayerReadouts(nn.Module):
    """R_ℓ [r, H] of every layer: all that the cosine alignment needs of the transfer space. Parameters: L·(r·H)."""

    def __init__(self, layers: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.readouts = nn.ModuleList(nn.Linear(hidden, rank, bias=False) for _ in range(layers))  # R_ℓ

    @torch.no_grad()
    def reset_parameters(self, directions: Tensor | None = None) -> None:
        """Set R_ℓ = Pᵀ from ``directions`` P [H, r]; None leaves them as they are."""
        if directions is not None:
            for readout in self.readouts:
                readout.get_parameter("weight").copy_(directions.T)

    def feature(self, layer: int, state: Tensor) -> Tensor:
        """f_ℓ: state [.., H] → z [.., r], z = √r · normalize(R_ℓ state)."""
        projected = linear(state, self.readouts[layer])
        exact = projected.to(at_least_float32(projected.dtype))
        unit = exact / exact.norm(dim=-1, keepdim=True).clamp_min(FLOOR)
        return (math.sqrt(self.rank) * unit).to(state.dtype)


class AdjacentCausalInjection(LayerReadouts):
    """R_ℓ and W_ℓ of every layer, and A, G_q, G_p, b for all. Parameters: L·(r·H) + L·(H·a) + 3·(a·r) + a."""

    def __init__(self, layers: int, hidden: int, rank: int, message: int) -> None:
        super().__init__(layers, hidden, rank)
        self.writes = nn.ModuleList(nn.Linear(message, hidden, bias=False) for _ in range(layers))  # W_ℓ
        self.message = nn.Linear(rank, message, bias=False)  # A
        self.receiver_gate = nn.Linear(rank, message, bias=False)  # G_q
        self.predecessor_gate = nn.Linear(rank, message, bias=False)  # G_p
        self.bias = nn.Parameter(torch.empty(message))  # b

    @torch.no_grad()
    def reset_parameters(self, directions: Tensor | None = None) -> None:
        """Set W, G_p, b = 0; A, G_q uniform in ±1/√r; R_ℓ = Pᵀ from ``directions`` P [H, r].

        Call it after the base model's ``post_init``, which redraws every linear layer.
        """
        super().reset_parameters(directions)
        for write in self.writes:
            nn.init.zeros_(write.get_parameter("weight"))
        nn.init.zeros_(self.predecessor_gate.weight)
        nn.init.zeros_(self.bias)
        bound = 1 / math.sqrt(self.rank)
        nn.init.uniform_(self.message.weight, -bound, bound)
        nn.init.uniform_(self.receiver_gate.weight, -bound, bound)

    def write(self, layer: int, state: Tensor, receiver: Tensor, predecessor: Tensor) -> Tensor:
        """h = u + RMS(u) · W_ℓ (g ⊙ m) for states u [.., H], receivers z_t [.., r], predecessors z_{t−1} [.., r].

        Leading dimensions broadcast: the transition cache writes K predecessors onto one state.
        """
        logits = linear(receiver, self.receiver_gate) + linear(predecessor, self.predecessor_gate)
        gate = torch.sigmoid(logits + self.bias.to(state.dtype))
        delta = linear(gate * linear(predecessor, self.message), self.writes[layer])
        exact = state.to(at_least_float32(state.dtype))
        rms = exact.square().mean(dim=-1, keepdim=True).sqrt().to(state.dtype)
        return state + rms * delta

    def forward(self, layer: int, states: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        """Inject after draft layer ``layer``: u [.., B, H] → h [.., B, H].

        Args:
            codes: [.., M, r], √r · C of the correct predecessors of slots 1..M.
            known: [.., M] (bool), the slots that use it; the others read their neighbor's feature. Slot 1 must.
        """
        features = self.feature(layer, states)
        predecessors = torch.where(known.unsqueeze(-1), codes, features[..., :-1, :])
        later = self.write(layer, states[..., 1:, :], features[..., 1:, :], predecessors)
        return torch.cat([states[..., :1, :], later], dim=-2)
