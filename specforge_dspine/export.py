"""Export a trained draft, and read exported ones back.

    python -m specforge_dspine.export --run DIR --to sglang|specforge --out DIR [--dtype bfloat16]
    python -m specforge_dspine.export --reference DIR --to sglang|specforge --out DIR [--dtype bfloat16]

Weights are cast once, by default to the recipe's dtype (for a reference checkpoint: its own); the code table stays
float32. After that cast the round trip is bit-exact. Writing verifies what was written; reading is strict.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.formats.config_json import FLAVORS
from specforge_dspine.formats.reader import read_checkpoint
from specforge_dspine.formats.third_party import read_reference
from specforge_dspine.formats.writer import DTYPES, write_checkpoint
from specforge_dspine.modeling.config import settings_of
from specforge_dspine.training.run_checkpoints import marked_best, newest_complete, read_state
from specforge_dspine.utils.errors import CheckpointError
from specforge_dspine.utils.files import read_json


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
    run: Path, flavor: str, out: Path, dtype: torch.dtype | None = None, *, checkpoint: str = "best"
) -> None:
    """Write a checkpoint of ``run`` (``read_run`` says which) as ``flavor`` into the folder ``out``, replacing an
    earlier export.

    Raises:
        CheckpointError: something is missing, not finite or contradictory, by name; nothing is written then.
    """
    tensors, config, trained = read_run(Path(run), checkpoint)
    write_checkpoint(tensors, config, flavor, out, dtype or trained)


def convert_reference(folder: Path, flavor: str, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint in the reference layout (``reference.py``) as ``flavor`` into the folder ``out``.

    Raises:
        CheckpointError: as ``export_run``.
    """
    tensors, config = read_reference(Path(folder))
    write_checkpoint(tensors, config, flavor, out, dtype or tensors["fc.weight"].dtype)


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
    parser.add_argument("--to", choices=FLAVORS, required=True)
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
    print(f"wrote and verified {args.out}: {args.to} flavor, r={settings.transfer_rank}, K={settings.top_k}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
