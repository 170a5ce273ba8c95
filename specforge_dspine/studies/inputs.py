"""What a study works on: a draft beside its target's tables, and captured samples of that target."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
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
from specforge_dspine.utils.fingerprint import model_fingerprint


@dataclass(frozen=True)
class Pair:
    """A draft at work beside its target's tables, and who they are."""

    drafter: BlockDrafter
    target: TargetIdentity
    facts: dict[str, Any]

    @property
    def proposals(self) -> int:
        """M."""
        return self.drafter.proposals


def open_pair(options: argparse.Namespace) -> Pair:
    """The draft and the target that the command line names.

    Raises:
        ValueError: the draft cannot be read, or is another target's.
    """
    draft = open_draft(options.draft, AutoTokenizer.from_pretrained(options.target))
    target = TargetIdentity.from_config(str(options.target), draft.target_layer_ids, dtype_of(draft))
    check_pair(draft, target)
    tables = TargetVerifier(target, torch.device(options.device), None)
    drafter = BlockDrafter(draft.to(tables.device), tables.head, tables.embedding)
    facts = {
        "draft": {"path": str(options.draft)} | draft_facts(options.draft, draft),
        "target": asdict(target) | {"fingerprint": model_fingerprint(options.target)},
        "versions": version_facts(),
        "seed": options.seed,
        "interval": INTERVAL,
    }
    return Pair(drafter, target, facts)


def open_features(folder: Path, limit: int | None, target: TargetIdentity) -> EvaluationSet:
    """The captured samples of ``folder``.

    Raises:
        ValueError: it holds none, or another target's.
    """
    found = open_set(f"captured={folder}", limit)
    check_features(folder, target)
    return found


def record_of(prompt: Prompt) -> dict[str, Tensor]:
    """The captured record behind a prompt.

    Raises:
        RecordError: it is damaged.
    """
    assert prompt.record is not None
    return read_record(prompt.record)
