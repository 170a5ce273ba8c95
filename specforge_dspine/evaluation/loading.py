"""Opens the draft that is to be measured, and says of draft, target and software who they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specforge_dspine.formats.config_json import CONFIG, integer, section
from specforge_dspine.formats.reader import load_dflash, load_draft
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.modeling.vocabulary import output_vocabulary
from specforge_dspine.streaming.record import TargetIdentity
from specforge_dspine.utils.files import read_json
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.versions import VERSION, installed


def open_draft(folder: Path, tokenizer: PreTrainedTokenizerBase) -> DSpineDraftModel:
    """An export of ours, of either flavor, or a DFlash draft of somebody else.

    Raises:
        CheckpointError: it is neither, or damaged, by name.
    """
    payload = read_json(folder / CONFIG)
    if "dspine_config" in payload or "dflash_config" not in payload:
        return load_draft(folder)
    mask = integer(section(payload, "dflash_config"), "mask_token_id", "dflash_config.")
    return load_dflash(folder, output_vocabulary(tokenizer, integer(payload, "vocab_size"), mask))


def untrained_like(draft: DSpineDraftModel, head: Tensor, seed: int = 0) -> DSpineDraftModel:
    """A draft of the same configuration as training would start from."""
    torch.manual_seed(seed)
    fresh = DSpineDraftModel(draft.config).to(head.device, draft.fc.weight.dtype)
    if draft.settings.has_readouts:
        fresh.set_transfer_space(build_transfer_space(head, draft.settings.transfer_rank))
    return fresh.eval()


def dtype_of(draft: DSpineDraftModel) -> str:
    """The dtype of the draft's weights, by name."""
    return str(draft.fc.weight.dtype).removeprefix("torch.")


def check_pair(draft: DSpineDraftModel, target: TargetIdentity) -> None:
    """Was the draft trained for a target of these sizes?

    Raises:
        ValueError: a size differs, with both values.
    """
    sizes = {
        "num_target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    for name, found in sizes.items():
        if getattr(draft.config, name) != found:
            raise ValueError(
                f"the draft is for a target with {name}={getattr(draft.config, name)}, "
                f"{target.model_path} has {found}"
            )


def draft_facts(folder: Path, draft: DSpineDraftModel) -> dict[str, Any]:
    """Which draft it is, and what kind."""
    method = draft.settings
    return {
        "fingerprint": model_fingerprint(folder),
        "block_size": draft.block_size,
        "layers": len(draft.layers),
        "causal": method.causal,
        "injection": method.injection,
        "refinement": method.refinement,
        "top_k": method.top_k,
    }


def version_facts() -> dict[str, str | None]:
    """Of everything that computes."""
    return {name: installed(name) for name in ("torch", "transformers", "sglang", "specforge")} | {
        "specforge_dspine": VERSION
    }
