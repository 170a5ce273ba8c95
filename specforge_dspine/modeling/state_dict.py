"""Check of a draft's tensors: names, shapes, finite values, and the code table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specforge_dspine.utils.errors import CheckpointError

TABLE, READY = "transfer_codes", "transfer_ready"
UNIT_TOLERANCE = 1e-3  # of the norm of a code


def check_tensors(tensors: Mapping[str, Tensor], draft: nn.Module) -> None:
    """Raise ``CheckpointError`` unless ``tensors`` are those of ``draft``, of their shapes, floating and finite.

    Where the variant has a code table, it must pass ``check_table`` and be marked as ready.
    """
    shapes = {name: tuple(value.shape) for name, value in draft.state_dict().items()}
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise CheckpointError(f"missing tensors: {', '.join(missing)}")
    if extra := sorted(tensors.keys() - shapes.keys()):
        raise CheckpointError(f"unknown tensors: {', '.join(extra)}")
    for name, shape in shapes.items():
        value = tensors[name]
        if tuple(value.shape) != shape:
            raise CheckpointError(f"{name} is {tuple(value.shape)}, the config says {shape}")
        if name == READY:
            continue
        if not value.is_floating_point():
            raise CheckpointError(f"{name} is {value.dtype}; weights must be of a floating dtype")
        if not torch.isfinite(value).all():
            raise CheckpointError(f"{name} holds a value that is not finite")
    if READY not in shapes:
        return
    if tensors[READY].dtype is not torch.bool or not bool(tensors[READY]):
        raise CheckpointError(f"{READY} is not True: the code table was never installed")
    check_table(tensors[TABLE])


def check_table(table: Tensor) -> None:
    """Raise ``CheckpointError`` unless ``table`` C [V, r] is float32, of unit rows, and was never cast to 16 bits.

    A row has norm 0 if the row of the head equals the mean.
    """
    if table.dtype is not torch.float32:
        raise CheckpointError(f"{TABLE} is {table.dtype}, and must be float32")
    norms = table.norm(dim=1)
    if bool(((norms - 1).abs() > UNIT_TOLERANCE).logical_and(norms > 0).any()) or not norms.any():
        raise CheckpointError(f"{TABLE} has rows of norm {norms.min():.4g} to {norms.max():.4g}, codes have norm 1")
    if table.shape[1] > 1 and torch.equal(table, table.to(torch.bfloat16).float()):
        raise CheckpointError(f"{TABLE} holds bfloat16 values in float32: it was cast on the way and is damaged")
