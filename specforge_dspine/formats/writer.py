"""Writing a draft to disk: verify, cast, write, read back, rename."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.formats.config_json import (
    BRIDGE,
    CARD,
    CONFIG,
    LAYOUTS,
    WEIGHTS,
    check_config,
    flavour_config,
    without_readouts,
)
from specforge_dspine.formats.reader import read_checkpoint
from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.modeling.state_dict import TABLE, check_tensors
from specforge_dspine.utils.errors import CheckpointError
from specforge_dspine.utils.versions import VERSION

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_checkpoint(
    tensors: dict[str, Tensor], config: Qwen3Config, flavor: str, out: Path, dtype: torch.dtype
) -> None:
    """Verify, cast and write a checkpoint beside ``out``, read it back bit for bit, then rename it.

    ``tensors`` are named as ``formats.expected_shapes`` says.

    Raises:
        CheckpointError: as ``export_run``, or ``out`` is something else than an earlier export.
    """
    check_tensors(tensors, config)
    if LAYOUTS[flavor].bridge is not None and not settings_of(config).injection:
        tensors, config = without_readouts(tensors, config)
    cast = {n: cast_weight(n, value, dtype).contiguous().clone() for n, value in tensors.items()}
    check_tensors(cast, config)  # again: a large weight overflows float16
    payload = flavour_config(config.to_dict(), config, flavor, dtype)
    check_config(payload)
    files = {WEIGHTS: {n: value for n, value in cast.items() if n != TABLE}}
    if TABLE in cast:
        file, stored_name = LAYOUTS[flavor].table
        files.setdefault(file, {})[stored_name] = cast[TABLE]

    out = Path(out).absolute()
    refuse_foreign(out, {*files, CONFIG, CARD})
    partial, old = (out.with_name(f".{out.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file, stored in files.items():
            save_file(stored, partial / file, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
        (partial / CARD).write_text(model_card(payload, flavor), encoding="utf-8")
        written, _ = read_checkpoint(partial)
        for name, value in cast.items():
            if not torch.equal(written[name], value):
                raise CheckpointError(f"{name} differs after writing: is the disk full or failing?")
        if out.exists():
            os.replace(out, old)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def refuse_foreign(out: Path, files: set[str]) -> None:
    """An export replaces an earlier export, and nothing else.

    Raises:
        CheckpointError: ``out`` is a file, or a folder that holds more than an export's ``files``.
    """
    if out.is_dir():
        if foreign := sorted(entry.name for entry in out.iterdir() if entry.name not in files):
            raise CheckpointError(f"{out} holds {foreign[0]!r}, which no export wrote; give a new or empty folder")
    elif out.exists():
        raise CheckpointError(f"{out} is a file; give a folder")


def cast_weight(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in the exported dtype; the code table keeps float32, whatever the rest is cast to."""
    if not value.is_floating_point():
        return value
    return value.to(torch.float32 if name == TABLE else dtype)


def model_card(payload: dict[str, Any], flavor: str) -> str:
    """What a person who finds the folder needs to know."""
    dflash, settings = payload["dflash_config"], payload["dspine_config"]
    table = f"`{TABLE}` is float32 and belongs to this draft: it must not be recomputed."
    serve = "Load it with `specforge_dspine.modeling.draft_model.DSpineDraftModel.from_pretrained`."
    if BRIDGE in dflash:
        serve = (
            "Serve it with `--speculative-algorithm DSPINE --speculative-draft-model-path <this folder>\n"
            f"--speculative-num-draft-tokens {payload['block_size']} --tp-size 1 --page-size 1`, never as plain\n"
            f"DFLASH. **Unverified**: the keys of `dflash_config.{BRIDGE}` are our reading of an unpublished\n"
            "format; loading in the released serving plugin was not tested."
        )
    elif flavor == "sglang":
        serve = f"A plain DFlash: serve it as DFLASH, `--speculative-num-draft-tokens {payload['block_size']}`."
    return f"""# DSpine draft ({flavor} flavor)

Written by specforge-dspine {VERSION}. Block size {payload["block_size"]} (anchor included),
{payload["num_hidden_layers"]} layers, target layers {dflash["target_layer_ids"]} (0-based, "output of layer k") of
{payload["num_target_layers"]}, transfer rank {settings["transfer_rank"]}, message size {settings["message_size"]},
{settings["top_k"]} candidates a position, mask token {dflash["mask_token_id"]}. Causal: {settings["causal"]};
injection: {settings["injection"]}; refinement: {settings["refinement"]}; alignment: {settings["alignment"]}.

Weights are {payload["dtype"]}. {table if settings["injection"] else ""}

{serve}
"""
