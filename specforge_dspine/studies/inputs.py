"""Inputs of a study: a draft with its target's tables, and captured samples of that target."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.evaluation.benchmarks import EvaluationSet, Prompt, open_set
from specforge_dspine.evaluation.bootstrap import INTERVAL
from specforge_dspine.evaluation.loading import TargetVerifier, drafter_of, open_pair
from specforge_dspine.evaluation.options import DraftAndTargetOptions
from specforge_dspine.evaluation.provenance import SOFTWARE, draft_facts, version_facts
from specforge_dspine.streaming.feature_folder import check_features
from specforge_dspine.streaming.record import TargetIdentity, read_record
from specforge_dspine.utils.cli import option
from specforge_dspine.utils.files import model_fingerprint


class StudyOptions(DraftAndTargetOptions):
    """Options of both studies."""

    heldout: Path = option("captured held-out samples", metavar="FEATURES")
    anchors: int = option("blocks of each sample", default=8, ge=1)


def open_study(options: StudyOptions) -> tuple[BlockDrafter, TargetIdentity, dict[str, Any]]:
    """Returns a draft with its target's tables, the target's identity, and facts of both. Raises as ``open_pair``."""
    draft, target = open_pair(options, AutoTokenizer.from_pretrained(options.target))
    facts = {
        "draft": {"path": str(options.draft)} | draft_facts(options.draft, draft),
        "target": asdict(target) | {"fingerprint": model_fingerprint(options.target)},
        "versions": version_facts(*SOFTWARE),
        "seed": options.seed,
        "interval": INTERVAL,
    }
    return drafter_of("draft", draft, TargetVerifier(target, options.device)), target, facts


def open_features(folder: Path, limit: int | None, target: TargetIdentity) -> EvaluationSet:
    """The captured samples of ``folder``; a ValueError if it holds none, or those of another target."""
    features = open_set(f"captured={folder}", limit)
    check_features(folder, target)
    return features


def record_of(prompt: Prompt) -> dict[str, Tensor]:
    """The captured record of a prompt; a RecordError if it is damaged."""
    assert prompt.record is not None
    return read_record(prompt.record)
