"""Export a trained draft, or convert one between layouts.

    python -m specforge_dspine.export --run DIR --to sglang|specforge --out DIR [--dtype bfloat16]
    python -m specforge_dspine.export --draft DIR --to sglang|specforge --out DIR [--dtype bfloat16]

``--run`` is the output_dir of a training run. ``--draft`` is a draft on disk: an export, SpecForge's own DSpine, a
plain DFlash, or the reference layout (``codes`` in transfer.safetensors).

Weights are cast once, by default to the recipe's dtype (of a draft: its own); the code table stays float32. After
that cast the round trip is bit-exact. Writing verifies what was written; reading is strict.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
import yaml
from pydantic import model_validator
from transformers import Qwen3Config

from specforge_dspine.formats.reader import load_draft
from specforge_dspine.formats.writer import DTYPES, write_checkpoint
from specforge_dspine.training.run_checkpoints import marked_best, newest_complete, read_state
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.errors import CheckpointError
from specforge_dspine.utils.files import read_json


def export_run(
    run: Path, layout: str, out: Path, dtype: torch.dtype | None = None, *, checkpoint: str = "best"
) -> str:
    """Write a checkpoint of a run into the folder ``out``, replacing an earlier export; return the checkpoint's name.

    ``checkpoint`` is "best" on held-out samples (the newest where none is marked), or "newest"; ``dtype`` is the
    recipe's by default.

    Raises:
        CheckpointError: the folder holds no run or no complete checkpoint, or as ``write_checkpoint``.
    """
    run = Path(run)
    try:
        config = Qwen3Config.from_dict(read_json(run / "draft_config.json"))
        recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
        wants_best = checkpoint == "best" and recipe.get("heldout") is not None
        folder = marked_best(run, recipe["run_id"]) if wants_best else None
        folder = folder or newest_complete(run, recipe["run_id"])
        if folder is None:
            raise ValueError("none was written yet")
        tensors = read_state(folder)["draft_state_dict"]
        dtype, target = dtype or DTYPES[recipe["model"]["torch_dtype"]], recipe["model"]["target_model_path"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{run}: not a run with a complete checkpoint ({error})") from error
    # A folder's name is the model's; its path is of no use to others.
    base_model = Path(target).name if Path(target).is_absolute() or Path(target).is_dir() else target
    write_checkpoint(tensors, config, layout, out, dtype, base_model=base_model)
    return folder.name


class ExportOptions(Options):
    """Where the draft comes from, and how it is written."""

    run: Path | None = option("output_dir of a training run", default=None)
    draft: Path | None = option("a draft on disk, in any known layout", default=None)
    checkpoint: Literal["best", "newest"] = option("of the run: best on held-out samples, or newest", default="best")
    to: Literal["sglang", "specforge"] = option("layout to write")
    out: Path = option("folder to write")
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        "of the weights; default: the source's", default=None
    )

    @model_validator(mode="after")
    def _one_source(self) -> ExportOptions:
        if (self.run is None) == (self.draft is None):
            raise ValueError("give exactly one of --run and --draft")
        return self


def export(options: ExportOptions) -> str:
    """Do what the command line says; return a sentence about the result. Raises as ``export_run``."""
    dtype = DTYPES[options.dtype] if options.dtype else None
    if options.run is not None:
        name = export_run(options.run, options.to, options.out, dtype, checkpoint=options.checkpoint)
        source = f"checkpoint {name}"
    else:
        assert options.draft is not None
        draft = load_draft(options.draft)
        write_checkpoint(draft.tensors, draft.config, options.to, options.out, dtype or draft.dtype)
        source = f"from the {draft.layout} layout"
    return f"wrote and verified {options.out}: {options.to} layout, {source}"


main = partial(run_command, Command(ExportOptions, export), module="specforge_dspine.export", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
