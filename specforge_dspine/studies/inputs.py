"""Inputs of a study: a draft with its target's tables, and captured samples of that target."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.evaluation.benchmarks import EvaluationSet, Prompt, open_set
from specforge_dspine.evaluation.bootstrap import INTERVAL
from specforge_dspine.evaluation.loading import TargetVerifier, check_pair, dtype_of, open_draft
from specforge_dspine.evaluation.provenance import draft_facts, version_facts
from specforge_dspine.streaming.feature_folder import check_features
from specforge_dspine.streaming.record import TargetIdentity, read_record
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.files import model_fingerprint


class StudyOptions(Options):
    """Options of both studies."""

    draft: Path = option("exported draft")
    target: Path = option("the target's folder")
    heldout: Path = option("captured held-out samples", metavar="FEATURES")
    out: Path = option("folder of the results")
    limit: int | None = option("held-out samples; default: all", default=None, ge=1)
    anchors: int = option("blocks of each sample", default=8, ge=1)
    seed: int = option("of all draws", default=0)
    device: str = option("of the draft and the target", default="cuda" if torch.cuda.is_available() else "cpu")


def open_draft_and_target(options: StudyOptions) -> tuple[BlockDrafter, TargetIdentity, dict[str, Any]]:
    """A draft with its target's tables, the target's identity, and what a result states about both.

    Raises:
        ValueError: the draft cannot be read, or was trained for another target.
    """
    draft = open_draft(options.draft, AutoTokenizer.from_pretrained(options.target))
    target = TargetIdentity.from_config(str(options.target), draft.target_layer_ids, dtype_of(draft))
    check_pair(draft, target)
    tables = TargetVerifier(target, torch.device(options.device), None)
    facts = {
        "draft": {"path": str(options.draft)} | draft_facts(options.draft, draft),
        "target": asdict(target) | {"fingerprint": model_fingerprint(options.target)},
        "versions": version_facts(),
        "seed": options.seed,
        "interval": INTERVAL,
    }
    return BlockDrafter(draft.to(tables.device), tables.head, tables.embedding), target, facts


def open_features(folder: Path, limit: int | None, target: TargetIdentity) -> EvaluationSet:
    """The captured samples of ``folder``; a ValueError if it holds none, or those of another target."""
    features = open_set(f"captured={folder}", limit)
    check_features(folder, target)
    return features


def record_of(prompt: Prompt) -> dict[str, Tensor]:
    """The captured record of a prompt; a RecordError if it is damaged."""
    assert prompt.record is not None
    return read_record(prompt.record)
