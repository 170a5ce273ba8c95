"""Export a trained draft, and read exported ones back.

    python -m specforge_dspine.export --run DIR --to sglang|specforge --out DIR [--dtype bfloat16]
    python -m specforge_dspine.export --reference DIR --to sglang|specforge --out DIR [--dtype bfloat16]

Weights are cast once, by default to the recipe's dtype (for a reference checkpoint: its own); the code table stays
float32. After that cast the round trip is bit-exact. Writing verifies what was written; reading is strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import yaml
from pydantic import model_validator
from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.formats.reader import read_checkpoint
from specforge_dspine.formats.third_party import read_reference
from specforge_dspine.formats.writer import DTYPES, write_checkpoint
from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.training.run_checkpoints import marked_best, newest_complete, read_state
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import CheckpointError
from specforge_dspine.utils.files import read_json


def read_run(run: Path, checkpoint: str) -> tuple[dict[str, Tensor], Qwen3Config, torch.dtype]:
    """A complete checkpoint of a run: its draft tensors, the draft's config and the recipe's dtype.

    ``checkpoint``: "best" on held-out samples (the newest where none is marked), or "newest".

    Raises:
        CheckpointError: the folder holds no run, or no complete checkpoint yet.
    """
    try:
        config = Qwen3Config.from_dict(read_json(run / "draft_config.json"))
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


class ExportOptions(Options):
    """Where the draft comes from, and how it is written."""

    run: Path | None = option("output_dir of a training run", default=None)
    reference: Path | None = option("checkpoint in the reference layout", default=None)
    checkpoint: Literal["best", "newest"] = option("of the run: best on held-out samples, or newest", default="best")
    to: Literal["sglang", "specforge"] = option("layout to write")
    out: Path = option("folder to write")
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        "of the weights; default: the source's", default=None
    )

    @model_validator(mode="after")
    def _one_source(self) -> ExportOptions:
        if (self.run is None) == (self.reference is None):
            raise ValueError("give exactly one of --run and --reference")
        return self


def export(options: ExportOptions) -> str:
    """Do what the command line says; returns a sentence about the result.

    Raises:
        CheckpointError: as ``export_run``.
    """
    dtype = DTYPES[options.dtype] if options.dtype else None
    if options.run is not None:
        export_run(options.run, options.to, options.out, dtype, checkpoint=options.checkpoint)
    elif options.reference is not None:
        convert_reference(options.reference, options.to, options.out, dtype)
    settings = settings_of(read_checkpoint(options.out)[1])
    return f"wrote and verified {options.out}: {options.to} layout, r={settings.transfer_rank}, K={settings.top_k}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(Command(ExportOptions, export), argv, module="specforge_dspine.export", doc=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
