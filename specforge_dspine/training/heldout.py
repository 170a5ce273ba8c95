"""Held-out evaluation between optimizer steps: the training metrics, without curriculum and gradient.

Each metric is a sum and a count until all batches and ranks are added up. The loss is then formed from the totals, as
if the held-out set were one optimizer window (§5):

    L = α ce + (1−α) l1 + α refined_ce + (1−α) refined_l1 + λ Σ_ℓ align_ℓ,    λ = β · ce

(normalization "shared": refined_ce and refined_l1 times coverage and heavy). ``eval/simulated_acc_len``, by which
SpecForge marks the best checkpoint, is the simulated τ of the path that decoding uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from specforge.algorithms.common.providers import OfflineDataProvider
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import StepContext
from torch import Tensor

from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.streaming.feature_folder import feature_name
from specforge_dspine.training.recipe import ALGORITHM
from specforge_dspine.training.run_logger import BEST
from specforge_dspine.training.strategy import DSpineTrainStrategy

TRAINING_ONLY = ("replacement_probability", "replaced_share")


class HeldoutSamples(Sequence[TrainBatch]):
    """Feature files as batches of one sample, read on access and normalized as training files are (``provider``)."""

    def __init__(self, files: Sequence[str], provider: OfflineDataProvider, max_length: int) -> None:
        self.files = files
        self.normalize, self.collate = provider.build_normalizer(max_length), provider.build_collator()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        path = Path(self.files[index])
        record = self.normalize(torch.load(path, map_location="cpu", weights_only=True))
        name = f"heldout-{feature_name(str(path))}"
        return TrainBatch(sample_ids=[name], strategy=ALGORITHM, tensors=self.collate([record]))


def shard(count: int, rank: int, ranks: int) -> Iterator[tuple[int, bool]]:
    """Yield indices below ``count`` for ``rank``, and whether each counts.

    Every rank runs as many forwards, which are collective under FSDP; surplus ones of the last round do not count.
    """
    for start in range(0, count, ranks):
        index = start + rank
        yield min(index, count - 1), index < count


def evaluate(
    strategy: DSpineTrainStrategy, batches: Sequence[TrainBatch], ctx: StepContext, *, rank: int = 0, ranks: int = 1
) -> dict[str, float]:
    """Return ``eval/*`` metrics over ``batches``, the same on every rank; the model's mode is restored."""
    totals = reduce_sums(rank_sums(strategy, batches, ctx, rank=rank, ranks=ranks), ranks)
    return {f"eval/{name}": value for name, value in summary(strategy, totals).items()}


@torch.no_grad()
def rank_sums(
    strategy: DSpineTrainStrategy, batches: Sequence[TrainBatch], ctx: StepContext, *, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Return sums and counts [2, width] by metric of this rank's part of ``batches``."""
    module = strategy.trainable_module()
    training = module.training
    module.eval()
    totals: dict[str, Tensor] = {}
    try:
        for index, counts in shard(len(batches), rank, ranks):
            parts = strategy.forward_loss(batches[index], ctx).ratio_metrics
            for name, (top, bottom) in parts.items():
                pair = torch.stack([torch.as_tensor(v).detach().double().flatten().cpu() for v in (top, bottom)])
                totals[name] = totals.get(name, 0) + pair * counts
    finally:
        module.train(training)
    return totals


def reduce_sums(totals: Mapping[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Add up sums and counts [2, width] by name over ranks."""
    names = sorted(totals)
    packed = torch.cat([totals[name] for name in names], dim=1)
    if ranks > 1:
        on_device = packed.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(on_device)
        packed = on_device.cpu()
    return dict(zip(names, packed.split([totals[name].shape[1] for name in names], dim=1), strict=True))


def summary(strategy: DSpineTrainStrategy, totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ratios by metric name (``name_i`` for vectors), the loss, and τ under SpecForge's name."""
    values: dict[str, float] = {}
    for name, (top, bottom) in totals.items():
        if name in TRAINING_ONLY:
            continue
        ratios = (top / bottom.clamp_min(1e-12)).tolist()
        values |= {name: ratios[0]} if len(ratios) == 1 else {f"{name}_{i}": v for i, v in enumerate(ratios)}
    inner = strategy.inner
    settings = inner.draft_model.settings
    if "beta" in values:
        values |= {"gate": values["ce"], "lambda": values["beta"] * values["ce"]}
    values["loss"] = loss(values, settings, inner.normalization)
    values[BEST.removeprefix("eval/")] = values["refined_tau" if settings.refinement else "tau"]
    return values


def loss(values: Mapping[str, float], settings: DSpineSettings, normalization: str) -> float:
    """Return L from the reduced parts (formula above); what a variant leaves out counts 0."""
    alpha, part = settings.ce_weight, lambda name: values.get(name, 0.0)
    covered, heavy = (part("coverage"), part("heavy")) if normalization == "shared" else (1.0, 1.0)
    backbone = alpha * part("ce") + (1 - alpha) * part("l1")
    refinement = alpha * covered * part("refined_ce") + (1 - alpha) * heavy * part("refined_l1")
    align = sum(value for name, value in values.items() if name == "align" or name.startswith("align_"))
    return backbone + refinement + part("lambda") * align
