"""The transfer space: formulas, streaming in chunks, determinism, the cache's key."""

from __future__ import annotations

import pytest
import torch

from specforge_dspine.modeling.transfer_space import build_transfer_space, cached_transfer_space, head_fingerprint


@pytest.fixture
def head() -> torch.Tensor:
    return torch.randn(50, 12, generator=torch.Generator().manual_seed(3))


def test_codes_whiten_the_centered_unit_rows(head: torch.Tensor) -> None:
    space = build_transfer_space(head, 12, dtype=torch.float64)
    unit = head.double() / head.double().norm(dim=1, keepdim=True)
    centered = unit - unit.mean(dim=0)
    whitened = centered @ space.directions / space.eigenvalues.sqrt()
    assert torch.allclose(whitened.T @ whitened, torch.eye(12, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(space.codes, whitened / whitened.norm(dim=1, keepdim=True), atol=1e-9)
    assert torch.allclose(space.codes.norm(dim=1), torch.ones(50, dtype=torch.float64))


def test_directions_are_ordered_and_signed(head: torch.Tensor) -> None:
    space = build_transfer_space(head, 7)
    assert (space.eigenvalues.diff() <= 0).all()
    largest = space.directions.gather(0, space.directions.abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


@pytest.mark.parametrize("chunk_rows", [1, 7, 49, 50, 64])
def test_chunks_do_not_change_the_table(head: torch.Tensor, chunk_rows: int) -> None:
    whole = build_transfer_space(head, 8, dtype=torch.float64, chunk_rows=1000)
    chunked = build_transfer_space(head, 8, dtype=torch.float64, chunk_rows=chunk_rows)
    assert torch.allclose(whole.codes, chunked.codes, atol=1e-10)


def test_only_chunks_of_the_head_are_widened() -> None:
    """No tensor larger than a few chunks or [H, H] is allocated: never a second copy of the head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(value, torch.Tensor) and value.dtype is torch.float64:
                    largest = max(largest, value.numel())
            return out

    head = torch.randn(4000, 16).bfloat16()
    with Watch():
        build_transfer_space(head, 8, chunk_rows=100)
    assert largest <= 100 * 16


def test_a_zero_row_stays_finite(head: torch.Tensor) -> None:
    head[4] = 0
    assert torch.isfinite(build_transfer_space(head, 5).codes).all()


def test_rank_beyond_the_head_is_refused(head: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"transfer_rank=13 must lie in 1\.\.12"):
        build_transfer_space(head, 13)
    low_rank = torch.randn(50, 3) @ torch.randn(3, 12)
    with pytest.raises(ValueError, match=r"set dspine\.transfer_rank to at most"):
        build_transfer_space(low_rank, 12)


def test_cache_key_covers_content_rank_and_dtype(head: torch.Tensor, tmp_path) -> None:  # type: ignore[no-untyped-def]
    other = head.clone()
    other[49, 11] += 1e-3
    keys = {
        head_fingerprint(head, 8),
        head_fingerprint(head, 7),
        head_fingerprint(other, 8),
        head_fingerprint(head.bfloat16(), 8),
    }
    assert len(keys) == 4
    first = cached_transfer_space(head, 8, tmp_path)
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    second = cached_transfer_space(head, 8, tmp_path)
    assert torch.equal(first.codes, second.codes) and path.stat().st_mtime_ns == written
    assert second.codes.dtype is torch.float32
    cached_transfer_space(other, 8, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
