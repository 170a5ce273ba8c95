"""The unified transfer space (§3): a fixed r-dimensional space, whitened out of the target's LM head.

    Ē_v = E_v / ‖E_v‖      μ = mean_v Ē_v      X_v = Ē_v − μ
    P, Λ = top-r eigenvectors and eigenvalues of Σ_v X_v X_vᵀ
    C_v = normalize(Λ^(−1/2) Pᵀ X_v)

All V rows count, padded rows included. For a reproducible table, eigenvalues descend and the largest-magnitude
component of each eigenvector is positive. A trained draft ships its own table, which is never recomputed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specforge_dspine.utils.files import atomic_write

TRANSFER_VERSION = 1  # part of the cache key: raise it when a formula below changes
CHUNK_ROWS = 8192  # rows of the head that are held in float64 at a time
FLOOR = 1e-12  # of every norm, so that a zero row stays finite
RANK_TOLERANCE = 1e-10  # λ_r / λ_1 below this: the head has no such direction


class TransferSpace(NamedTuple):
    """The table of codes, and what it was made of."""

    codes: Tensor  # C [V, r], unit rows
    directions: Tensor  # P [H, r]
    eigenvalues: Tensor  # Λ [r]
    mean: Tensor  # μ [H]


def _unit_rows(head: Tensor, chunk_rows: int) -> Iterator[Tensor]:
    """Ē in chunks [≤ chunk_rows, H], float64: the head is never held twice at full size."""
    for rows in head.split(chunk_rows):
        rows = rows.to(torch.float64)
        yield rows / rows.norm(dim=1, keepdim=True).clamp_min(FLOOR)


def build_transfer_space(
    head: Tensor, rank: int, *, dtype: torch.dtype = torch.float32, chunk_rows: int = CHUNK_ROWS
) -> TransferSpace:
    """Whiten ``head`` E [V, H] into a transfer space of ``rank`` r, computed in float64 on the head's device.

    Three passes (mean, second moment, codes), ``chunk_rows`` rows at a time. Extra memory: two chunks, three [H, H]
    matrices and the table [V, r] itself.

    Raises:
        ValueError: ``rank`` exceeds H, or the centered head has fewer independent directions.
    """
    vocab, hidden = head.shape
    if not 0 < rank <= hidden:
        raise ValueError(f"transfer_rank={rank} must lie in 1..{hidden}, the hidden size")
    head = head.detach()
    total = torch.zeros(hidden, dtype=torch.float64, device=head.device)
    for unit in _unit_rows(head, chunk_rows):
        total += unit.sum(dim=0)
    mean = total / vocab

    moment = torch.zeros(hidden, hidden, dtype=torch.float64, device=head.device)
    for unit in _unit_rows(head, chunk_rows):
        centered = unit - mean
        moment.addmm_(centered.T, centered)
    ascending, vectors = torch.linalg.eigh(moment)
    eigenvalues = ascending.flip(0)[:rank]
    directions = vectors.flip(1)[:, :rank]
    if eigenvalues[-1] <= RANK_TOLERANCE * eigenvalues[0]:
        usable = int((eigenvalues > RANK_TOLERANCE * eigenvalues[0]).sum())
        raise ValueError(
            f"transfer_rank={rank} exceeds the {usable} independent directions of this LM head "
            f"[{vocab}, {hidden}]; set dspine.transfer_rank to at most {usable}"
        )
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    directions = directions * largest.sign()

    whitening = directions * eigenvalues.rsqrt()
    codes = torch.empty(vocab, rank, dtype=dtype, device=head.device)
    for start, unit in zip(range(0, vocab, chunk_rows), _unit_rows(head, chunk_rows), strict=True):
        projected = (unit - mean) @ whitening
        codes[start : start + len(unit)] = projected / projected.norm(dim=1, keepdim=True).clamp_min(FLOOR)
    return TransferSpace(codes, directions.to(dtype), eigenvalues.to(dtype), mean.to(dtype))


def head_fingerprint(head: Tensor, rank: int) -> str:
    """The cache key: hex digest over the content, dtype and shape of ``head`` [V, H], over r and our version."""
    digest = hashlib.sha256(f"{TRANSFER_VERSION}:{rank}:{head.dtype}:{tuple(head.shape)}".encode())
    for rows in head.detach().split(CHUNK_ROWS):
        digest.update(memoryview(rows.contiguous().cpu().view(torch.uint8).numpy()).cast("B"))
    return digest.hexdigest()[:32]


def cached_transfer_space(head: Tensor, rank: int, cache_dir: str | os.PathLike[str]) -> TransferSpace:
    """``build_transfer_space`` in float32, kept under ``cache_dir`` by the fingerprint of ``head`` [V, H]."""
    path = Path(cache_dir) / f"transfer-{head_fingerprint(head, rank)}.safetensors"
    if not path.exists():
        space = build_transfer_space(head, rank)
        with atomic_write(path) as file:  # a killed run leaves no part of a table
            save_file({name: value.contiguous().cpu() for name, value in space._asdict().items()}, file.name)
    tensors = load_file(path)
    return TransferSpace(**{name: tensors[name].to(head.device) for name in TransferSpace._fields})
