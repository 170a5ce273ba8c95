"""What training reports of a micro-batch: parts, each a sum and a count, added up before they are divided."""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.objective.supervision import SupervisedPositions

Part = tuple[Tensor, Tensor]  # sum, count


def is_reported(name: str, settings: DSpineSettings) -> bool:
    """Whether the part ``name`` exists in this variant of the method."""
    if name in ("replacement_probability", "replaced_share"):
        return settings.curriculum
    if name in ("align", "lambda", "gate", "beta"):
        return settings.alignment != "off"
    if name in ("l1", "refined_l1", "heavy", "candidate_mass") and settings.ce_weight == 1:
        return False
    if name.startswith("refined_") or name in ("coverage", "heavy", "candidate_mass"):
        return settings.refinement
    return True


def loss_parts(sums: dict[str, Tensor], settings: DSpineSettings, gate: Tensor, beta: float) -> dict[str, Part]:
    """The parts of the loss, from the ``sums`` that it is made of."""
    total = sums["weight"]
    one = torch.ones_like(total)
    parts = {
        "ce": (sums["ce"], total),
        "l1": (sums["l1"], total),
        "refined_ce": (sums["refined_ce"], sums["covered"]),
        "refined_l1": (sums["refined_l1"], sums["heavy"]),
        "align": (sums["align"], total.expand_as(sums["align"])),
        "coverage": (sums["covered"], total),
        "heavy": (sums["heavy"], total),
        "candidate_mass": (sums["mass"], total),
        "gate": (gate * one, one),
        "lambda": (beta * gate * one, one),
    }
    return {name: (n.detach(), d.detach()) for name, (n, d) in parts.items() if is_reported(name, settings)}


def accuracy_parts(
    positions: SupervisedPositions, shape: tuple[int, int, int], correct: dict[str, Tensor]
) -> dict[str, Part]:
    """Count of positions; accuracy, accuracy by slot, and τ of every output in ``correct`` (prefix → [n], bool).

    τ is simulated: the teacher-forced greedy prefix + 1, mean over blocks. ``shape`` is (R, N, M).
    """

    def grid(values: Tensor) -> Tensor:
        """``values`` [n] by block and slot, [R·N, M]; 0 where nothing is supervised."""
        cells = torch.zeros(shape, device=values.device)
        where = (positions.sequence, positions.block, positions.slot - 1)
        return cells.index_put(where, (values & (positions.weight > 0)).float()).flatten(0, 1)

    counted = grid(torch.ones_like(positions.label, dtype=torch.bool))
    blocks = counted[:, 0]
    parts = {"rows": (counted.sum(), torch.ones_like(counted.sum()))}
    for prefix, values in correct.items():
        right = grid(values)
        accepted = right.cumprod(dim=-1).sum(dim=-1)
        parts |= {
            f"{prefix}accuracy": (right.sum(), counted.sum()),
            f"{prefix}accuracy_at": (right.sum(dim=0), counted.sum(dim=0)),
            f"{prefix}tau": ((accepted + 1).mul(blocks).sum(), blocks.sum()),
        }
    return parts
