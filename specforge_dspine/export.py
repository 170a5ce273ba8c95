"""Export a trained draft, and read exported ones back.

    python -m specforge_dspine.export --run DIR --to sglang|specforge --out DIR [--dtype bfloat16]
    python -m specforge_dspine.export --reference DIR --to sglang|specforge --out DIR [--dtype bfloat16]

Weights are cast once, by default to the recipe's dtype (for a reference checkpoint: its own); the code table stays
float32. After that cast the round trip is bit-exact. Writing verifies what was written; reading is strict.
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
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.checkpoints import marked_best, newest_complete, read_state
from specforge_dspine.config import ARCHITECTURE, settings_of
from specforge_dspine.formats import (
    BRIDGE,
    CARD,
    CONFIG,
    FLAVOURS,
    LAYOUTS,
    TABLE,
    WEIGHTS,
    CheckpointError,
    check_config,
    check_tensors,
    flavour_config,
    without_readouts,
)
from specforge_dspine.model import DSpineDraftModel
from specforge_dspine.reference import read_dflash, read_json, read_reference, read_tensors
from specforge_dspine.version import VERSION

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def read_run(run: Path, checkpoint: str) -> tuple[dict[str, Tensor], Qwen3Config, torch.dtype]:
    """A complete checkpoint of a run: its draft tensors, the draft's config and the recipe's dtype.

    ``checkpoint``: "best" on held-out samples (the newest where none is marked), or "newest".

    Raises:
        CheckpointError: the folder holds no run, or no complete checkpoint yet.
    """
    config = Qwen3Config.from_dict(read_json(run / "draft_config.json"))
    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
        wants_best = checkpoint == "best" and recipe.get("heldout") is not None
        folder = marked_best(run, recipe["run_id"]) if wants_best else None
        folder = folder or newest_complete(run, recipe["run_id"])
        if folder is None:
            raise ValueError("none was written yet")
        print(f"checkpoint: {folder.name}", flush=True)
        return read_state(folder)["draft_state_dict"], config, DTYPES[recipe["model"]["torch_dtype"]]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{run}: not a run with a complete checkpoint ({error})") from error


def export_run(
    run: Path, flavour: str, out: Path, dtype: torch.dtype | None = None, *, checkpoint: str = "best"
) -> None:
    """Write a checkpoint of ``run`` (``read_run`` says which) as ``flavour`` into the folder ``out``, replacing an
    earlier export.

    Raises:
        CheckpointError: something is missing, not finite or contradictory, by name; nothing is written then.
    """
    tensors, config, trained = read_run(Path(run), checkpoint)
    write_checkpoint(tensors, config, flavour, out, dtype or trained)


def convert_reference(folder: Path, flavour: str, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint in the reference layout (``reference.py``) as ``flavour`` into the folder ``out``.

    Raises:
        CheckpointError: as ``export_run``.
    """
    tensors, config = read_reference(Path(folder))
    write_checkpoint(tensors, config, flavour, out, dtype or tensors["fc.weight"].dtype)


def write_checkpoint(
    tensors: dict[str, Tensor], config: Qwen3Config, flavour: str, out: Path, dtype: torch.dtype
) -> None:
    """Verify, cast and write a checkpoint beside ``out``, read it back bit for bit, then rename it.

    ``tensors`` are named as ``formats.expected_shapes`` says.

    Raises:
        CheckpointError: as ``export_run``, or ``out`` is something else than an earlier export.
    """
    check_tensors(tensors, config)
    if LAYOUTS[flavour].bridge is not None and not settings_of(config).injection:
        tensors, config = without_readouts(tensors, config)
    cast = {n: cast_weight(n, value, dtype).contiguous().clone() for n, value in tensors.items()}
    check_tensors(cast, config)  # again: a large weight overflows float16
    payload = flavour_config(config.to_dict(), config, flavour, dtype)
    check_config(payload)
    files = {WEIGHTS: {n: value for n, value in cast.items() if n != TABLE}}
    if TABLE in cast:
        file, stored_name = LAYOUTS[flavour].table
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
        (partial / CARD).write_text(model_card(payload, flavour), encoding="utf-8")
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


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Qwen3Config]:
    """Tensors and config of an exported draft of either flavour, checked.

    Raises:
        CheckpointError: a missing, unknown or wrong-shaped tensor, a missing bridge or flag, by name.
    """
    folder = Path(folder)
    payload = read_json(folder / CONFIG)
    flavour = check_config(payload)
    config = Qwen3Config.from_dict(payload | {"architectures": [ARCHITECTURE]})
    tensors = read_tensors(folder, LAYOUTS[flavour].table if settings_of(config).has_readouts else None)
    check_tensors(tensors, config)
    for name, value in tensors.items():
        if name != TABLE and value.is_floating_point() and str(value.dtype) != f"torch.{payload.get('dtype')}":
            raise CheckpointError(f"{name} is {value.dtype}, config.json says dtype={payload.get('dtype')!r}")
    return tensors, config


def load_draft(folder: Path, *, attention: str = "sdpa") -> DSpineDraftModel:
    """A draft of either flavour, in eval mode, in the dtype it was exported in.

    Raises:
        CheckpointError: as ``read_checkpoint``.
    """
    return built(*read_checkpoint(folder), attention)


def load_dflash(folder: Path, emittable: tuple[list[int], int]) -> DSpineDraftModel:
    """A DFlash draft that is not ours (``reference.read_dflash``), in eval mode, in the dtype of its weights.

    Raises:
        CheckpointError: as ``read_dflash``.
    """
    return built(*read_dflash(folder, emittable), "sdpa")


def built(tensors: dict[str, Tensor], config: Qwen3Config, attention: str) -> DSpineDraftModel:
    """The draft of these tensors and this config, in eval mode and in the tensors' dtype."""
    config._attn_implementation = attention
    draft = DSpineDraftModel(config).to(tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors, strict=True)
    return draft.eval()


def model_card(payload: dict[str, Any], flavour: str) -> str:
    """What a person who finds the folder needs to know."""
    dflash, settings = payload["dflash_config"], payload["dspine_config"]
    table = f"`{TABLE}` is float32 and belongs to this draft: it must not be recomputed."
    serve = "Load it with `specforge_dspine.model.DSpineDraftModel.from_pretrained`."
    if BRIDGE in dflash:
        serve = (
            "Serve it with `--speculative-algorithm DSPINE --speculative-draft-model-path <this folder>\n"
            f"--speculative-num-draft-tokens {payload['block_size']} --tp-size 1 --page-size 1`, never as plain\n"
            f"DFLASH. **Unverified**: the keys of `dflash_config.{BRIDGE}` are our reading of an unpublished\n"
            "format; loading in the released serving plugin was not tested."
        )
    elif flavour == "sglang":
        serve = f"A plain DFlash: serve it as DFLASH, `--speculative-num-draft-tokens {payload['block_size']}`."
    return f"""# DSpine draft ({flavour} flavour)

Written by specforge-dspine {VERSION}. Block size {payload["block_size"]} (anchor included),
{payload["num_hidden_layers"]} layers, target layers {dflash["target_layer_ids"]} (0-based, "output of layer k") of
{payload["num_target_layers"]}, transfer rank {settings["transfer_rank"]}, message size {settings["message_size"]},
{settings["top_k"]} candidates a position, mask token {dflash["mask_token_id"]}. Causal: {settings["causal"]};
injection: {settings["injection"]}; refinement: {settings["refinement"]}; alignment: {settings["alignment"]}.

Weights are {payload["dtype"]}. {table if settings["injection"] else ""}

{serve}
"""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="output_dir of a training run")
    source.add_argument("--reference", type=Path, help="checkpoint in the reference layout")
    parser.add_argument(
        "--checkpoint",
        choices=("best", "newest"),
        default="best",
        help="of the run: best on held-out samples (default)",
    )
    parser.add_argument("--to", choices=FLAVOURS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights; default: the source's")
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype] if args.dtype else None
    try:
        if args.run is not None:
            export_run(args.run, args.to, args.out, dtype, checkpoint=args.checkpoint)
        else:
            convert_reference(args.reference, args.to, args.out, dtype)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = settings_of(read_checkpoint(args.out)[1])
    print(f"wrote and verified {args.out}: {args.to} flavour, r={settings.transfer_rank}, K={settings.top_k}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
