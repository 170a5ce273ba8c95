"""Drafts written to disk: check, cast, write, read back, rename."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.formats.config_json import (
    CARD,
    CONFIG,
    LAYOUTS,
    WEIGHTS,
    check_config,
    layout_config,
    without_readouts,
)
from specforge_dspine.formats.model_card import model_card
from specforge_dspine.formats.reader import load_draft
from specforge_dspine.modeling.draft_model import meta_draft
from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.modeling.state_dict import TABLE, check_tensors
from specforge_dspine.utils.errors import CheckpointError
from specforge_dspine.utils.files import atomic_folder, write_json

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_checkpoint(
    tensors: dict[str, Tensor],
    config: Qwen3Config,
    layout: str,
    out: Path,
    dtype: torch.dtype,
    *,
    base_model: str | None = None,
) -> None:
    """Write a draft beside ``out``, read it back bit for bit, then rename it, replacing an earlier export.

    ``tensors`` are the draft's state dict; ``base_model`` is the target's name, for the model card.

    Raises:
        CheckpointError: a tensor or key is missing, not finite or contradictory, by name; or ``out`` is something
            else than an earlier export. Nothing is written then.
    """
    check_tensors(tensors, meta_draft(config))
    if LAYOUTS[layout].bridge is not None and not settings_of(config).injection:
        tensors, config = without_readouts(tensors, config)
    cast = {n: cast_weight(n, value, dtype).contiguous().clone() for n, value in tensors.items()}
    check_tensors(cast, meta_draft(config))  # again: a large weight overflows float16
    payload = layout_config(config.to_dict(), config, layout, dtype)
    check_config(payload)
    files = {WEIGHTS: {n: value for n, value in cast.items() if n != TABLE}}
    if TABLE in cast:
        file, stored_name = LAYOUTS[layout].table
        files.setdefault(file, {})[stored_name] = cast[TABLE]

    out = Path(out).absolute()
    refuse_other_files(out, {*files, CONFIG, CARD})
    with atomic_folder(out) as partial:
        for file, stored in files.items():
            save_file(stored, partial / file, metadata={"format": "pt"})
        write_json(partial / CONFIG, payload)
        model_card(payload, layout, base_model).save(partial / CARD)
        written = load_draft(partial).tensors
        for name, value in cast.items():
            if not torch.equal(written[name], value):
                raise CheckpointError(f"{name} differs after writing: is the disk full or failing?")


def refuse_other_files(out: Path, files: set[str]) -> None:
    """Raise ``CheckpointError`` if ``out`` is a file, or a folder that holds more than an export's ``files``."""
    if out.is_dir():
        if others := sorted(entry.name for entry in out.iterdir() if entry.name not in files):
            raise CheckpointError(f"{out} holds {others[0]!r}, which no export wrote; give a new or empty folder")
    elif out.exists():
        raise CheckpointError(f"{out} is a file; give a folder")


def cast_weight(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in the exported dtype; the code table keeps float32, whatever the rest is cast to."""
    if not value.is_floating_point():
        return value
    return value.to(torch.float32 if name == TABLE else dtype)
