"""Export a trained draft, and read exported ones back.

    python -m specforge_dspine.export --run DIR --to sglang|specforge --out DIR [--dtype bfloat16]

Weights are cast once, to the recipe's dtype by default; the code table stays float32. After that cast the round
trip is bit-exact. Writing verifies what was written; reading is strict.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from specforge.training.checkpoint import STATE_FILE, CheckpointManager
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.config import ARCHITECTURE, settings_of
from specforge_dspine.formats import (
    BRIDGE,
    FLAVOURS,
    TABLE,
    WEIGHTS,
    CheckpointError,
    check_config,
    check_tensors,
    flavour_config,
)
from specforge_dspine.model import DSpineDraftModel
from specforge_dspine.version import VERSION

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def read_run(run: Path) -> tuple[dict[str, Tensor], Qwen3Config, dict[str, Any]]:
    """The newest complete checkpoint of a run: its draft tensors, the draft's config and the recipe.

    Raises:
        CheckpointError: the folder holds no run, or no complete checkpoint yet.
    """
    try:
        config = Qwen3Config.from_dict(json.loads((run / "draft_config.json").read_text(encoding="utf-8")))
        recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
        folder = Path(CheckpointManager.resolve_resume_dir(str(run)))
    except FileNotFoundError as error:
        raise CheckpointError(f"{run}: not a run with a complete checkpoint ({error})") from error
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=False, mmap=True)
    return state["draft_state_dict"], config, recipe


def export_run(run: Path, flavour: str, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write the newest checkpoint of ``run`` as ``flavour`` into the folder ``out``, replacing an earlier export.

    Raises:
        CheckpointError: something is missing, not finite or contradictory, by name; nothing is written then.
    """
    tensors, config, recipe = read_run(Path(run))
    if dtype is None:
        dtype = DTYPES[(recipe.get("model") or {}).get("torch_dtype", "bfloat16")]
    write_checkpoint(tensors, config, flavour, out, dtype)


def write_checkpoint(
    tensors: dict[str, Tensor], config: Qwen3Config, flavour: str, out: Path, dtype: torch.dtype
) -> None:
    """Verify, cast and write a checkpoint beside ``out``, read it back bit for bit, then rename it.

    ``tensors`` are named as ``formats.expected_shapes`` says.
    """
    cast = {n: cast_weight(n, value, dtype).contiguous().clone() for n, value in tensors.items()}
    check_tensors(cast, config)
    payload = flavour_config(config.to_dict(), config, flavour, dtype)
    check_config(payload)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(cast, partial / WEIGHTS, metadata={"format": "pt", "specforge_dspine": VERSION})
    (partial / "config.json").write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
    (partial / "README.md").write_text(model_card(payload, flavour), encoding="utf-8")
    written, _ = read_checkpoint(partial)
    for name, value in cast.items():
        if not torch.equal(written[name], value):
            raise CheckpointError(f"{name} differs after writing: is the disk full or failing?")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)


def cast_weight(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in the exported dtype; the code table keeps float32, whatever the rest is cast to."""
    if not value.is_floating_point():
        return value
    return value.to(torch.float32 if name == TABLE else dtype)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Qwen3Config]:
    """Tensors and config of an exported draft of either flavour, checked.

    Raises:
        CheckpointError: a missing, unknown or wrong-shaped tensor, a missing bridge or flag, by name.
    """
    folder = Path(folder)
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
    payload = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_config(payload)
    config = Qwen3Config.from_dict(payload | {"architectures": [ARCHITECTURE]})
    tensors = load_file(folder / WEIGHTS)
    check_tensors(tensors, config)
    return tensors, config


def load_draft(folder: Path, *, attention: str = "sdpa") -> DSpineDraftModel:
    """A draft of either flavour, in eval mode, in the dtype it was exported in.

    Raises:
        CheckpointError: as ``read_checkpoint``.
    """
    tensors, config = read_checkpoint(folder)
    config._attn_implementation = attention
    draft = DSpineDraftModel(config).to(tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors, strict=True)
    return draft.eval()


def model_card(payload: dict[str, Any], flavour: str) -> str:
    """What a person who finds the folder needs to know."""
    dflash, settings = payload["dflash_config"], payload["dspine_config"]
    serve = (
        "Serve it with `--speculative-algorithm DSPINE --speculative-draft-model-path <this folder>\n"
        f"--speculative-num-draft-tokens {payload['block_size']} --tp-size 1 --page-size 1`, never as plain DFLASH.\n"
        f"**Unverified**: the keys of `dflash_config.{BRIDGE}` are our reading of an unpublished format; loading in\n"
        "the released serving plugin was not tested."
        if flavour == "sglang"
        else "Load it with `specforge_dspine.model.DSpineDraftModel.from_pretrained`."
    )
    return f"""# DSpine draft ({flavour} flavour)

Written by specforge-dspine {VERSION}. Block size {payload["block_size"]} (anchor included),
{payload["num_hidden_layers"]} layers, target layers {dflash["target_layer_ids"]} (0-based, "output of layer k") of
{payload["num_target_layers"]}, transfer rank {settings["transfer_rank"]}, message size {settings["message_size"]},
{settings["top_k"]} candidates a position, mask token {dflash["mask_token_id"]}.

Weights are {payload["dtype"]}; `{TABLE}` is float32 and belongs to this draft: it must not be recomputed.

{serve}
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specforge_dspine.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="output_dir of a training run")
    parser.add_argument("--to", choices=FLAVOURS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights; default: the recipe's torch_dtype")
    args = parser.parse_args(argv)
    try:
        export_run(args.run, args.to, args.out, DTYPES[args.dtype] if args.dtype else None)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = settings_of(read_checkpoint(args.out)[1])
    print(f"wrote and verified {args.out}: {args.to} flavour, r={settings.transfer_rank}, K={settings.top_k}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
