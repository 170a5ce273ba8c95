"""Resume contract: what must not change between a checkpoint and its continuation.

Every checkpoint carries the contract through SpecForge's seam: objective and draft option by option, optimizer and
schedule, data by content. SpecForge adds the target's files and the taps. It compares them too, but late, one value
at a time, and with whole inventories of files in its message. ``refuse_changes`` comes before anything is touched
and names all that differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specforge.algorithms.common.providers import MODEL_PROVENANCE_CONTRACT_KEY, STEP_OPTIONS_CONTRACT_KEY
from specforge.config import Config
from specforge.runtime.data_plane.offline_reader import list_feature_files

from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineOptions
from specforge_dspine.objective.training_model import DSpineTrainingModel
from specforge_dspine.training.distributed import on_every_rank
from specforge_dspine.training.run_checkpoints import read_state
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import differences, file_sha256, looked_in

SAMPLED_FILES = 256  # feature files of which the end is read; the end of a .ckpt lists its tensors' checksums
SAMPLED_BYTES = 1 << 12
SHOWN = 8  # differences that a message names

# SpecForge's own keys in a checkpoint, as the recipe spells them.
SPELLING = {
    "world_size": "ranks",
    "batch_size": "training.batch_size",
    "accumulation_steps": "training.accumulation_steps",
    "num_epochs": "training.num_epochs",
    "effective_total_steps": "training.total_steps",
    f"{MODEL_PROVENANCE_CONTRACT_KEY}.target_model": "model.target_model_path",
    f"{MODEL_PROVENANCE_CONTRACT_KEY}.draft_config": "model.draft_model_config",
}


def resume_contract(
    options: DSpineOptions, config: Config, draft: DSpineDraftModel, model: DSpineTrainingModel
) -> Mapping[str, Any]:
    """Return our part of the contract, for a checkpoint. Every rank calls it; rank 0 reads the data."""
    training, data = config.training, config.data
    return {
        **{f"dspine.{name}": value for name, value in options.model_dump(mode="json").items()},
        "model.mask_token_id": int(draft.mask_token_id),
        "training.num_anchors": model.num_anchors,
        "training.loss_decay_gamma": model.loss_decay_gamma,
        "training.attention_backend": model.attention_backend,
        "training.learning_rate": training.learning_rate,
        "training.lr_scheduler": training.lr_scheduler,
        "training.max_grad_norm": training.max_grad_norm,
        "training.fsdp_sharding": training.fsdp_sharding,
        "data.max_length": data.max_length,
        "data.max_prompts": data.max_prompts,
        "data": on_every_rank(lambda: data_identity(Path(data.hidden_states_path or data.prompts_path))),
    }


def data_identity(path: Path) -> str:
    """Identify a run's data by content, wherever it lies: a file of samples, or a folder of feature files.

    Of feature files count names and sizes, and the ends of some of them.
    """
    if not path.exists():
        raise RecipeError(f"data: there is no {path}{looked_in(path)}")
    if not path.is_dir():
        return f"prompts of {path.stat().st_size:,} bytes, sha256 {file_sha256(path)[:16]}"
    digest, total, files = hashlib.sha256(), 0, list_feature_files(str(path))
    for index, file in enumerate(files):
        size = os.path.getsize(file)
        total += size
        digest.update(f"{os.path.relpath(file, path)} {size}\n".encode())
        if index % -(-len(files) // SAMPLED_FILES) == 0:
            with open(file, "rb") as stream:
                stream.seek(max(0, size - SAMPLED_BYTES))
                digest.update(stream.read())
    return f"{len(files):,} feature files of {total:,} bytes, sha256 {digest.hexdigest()[:16]}"


def refuse_changes(checkpoint: str, current: Mapping[str, Any]) -> None:
    """Compare the contract of this run with the one that ``checkpoint`` was written under.

    Raises:
        RecipeError: something differs; all of it is named.
    """
    state = read_state(Path(checkpoint))
    then = dict(flatten_contract({key: state[key] for key in current if key in state}))
    now = dict(flatten_contract(current))
    differing = [f"{name} was {was} and is {value}" for name, was, value in differences(then, now)]
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise RecipeError(
            f"--resume: {Path(checkpoint).name} belongs to another run: {'; '.join(differing[:SHOWN])}{more}; "
            "restore that, or start in another output_dir"
        )


def flatten_contract(contract: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a contract as (name in the recipe, value as text), inventories of files one file at a time."""
    for key, value in contract.items():
        if key == STEP_OPTIONS_CONTRACT_KEY:
            yield from ((f"training.{name}", str(inner)) for name, inner in value)
        elif key == MODEL_PROVENANCE_CONTRACT_KEY:
            for name, inner in value:
                if name == "capture_layers":
                    continue  # the same as dspine.target_layer_ids
                shown = SPELLING.get(f"{key}.{name}", f"model.{name}")
                if isinstance(inner, tuple) and inner[0] == "directory-stat-v2":
                    _kind, folder, files = inner
                    yield shown, str(folder)
                    yield from ((f"{shown}/{file[1]}", describe_file(file)) for file in files)
                else:
                    yield shown, str(inner)
        else:
            yield SPELLING.get(key, key), str(value)


def describe_file(identity: tuple[Any, ...]) -> str:
    """Describe SpecForge's identity of a file: small ones by content, large ones by size and modification time."""
    kind, _name, size, mark = identity
    if kind == "sha256":
        return f"{size:,} bytes, sha256 {mark[:16]}"
    return f"{size:,} bytes of {datetime.fromtimestamp(mark / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"
