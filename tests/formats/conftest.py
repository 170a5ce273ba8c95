"""A tiny run and its exports, for the tests of checkpoints on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from specforge_dspine.export import main
from specforge_dspine.formats.config_json import LAYOUTS
from specforge_dspine.objective.training_model import DSpineTrainingModel
from tests.support.drafts import MASK_ID, VOCAB, make_model

Change = Callable[[dict[str, Any]], object]


def save_run(run: Path, tensors: dict[str, Tensor], step: int = 3, **model: str) -> None:
    """A run's folder as training leaves it, as far as an export reads it."""
    config = make_model(dtype=torch.float32).draft_model.config
    config.bos_token_id, config.eos_token_id = 1, 2
    config.dspine_config = config.dspine_config | {"excluded_ids": [MASK_ID], "valid_vocab_size": VOCAB - 3}
    folder = run / f"tiny-step{step}"
    folder.mkdir(parents=True)
    (run / "draft_config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    document = {"run_id": "tiny", "model": {"target_model_path": "target", "torch_dtype": "bfloat16"} | model}
    (run / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    save_state(folder, tensors, step)


def save_state(folder: Path, tensors: dict[str, Tensor], step: int) -> None:
    """What an export needs of a checkpoint of one rank."""
    torch.save({"draft_state_dict": tensors, "global_step": step, "world_size": 1}, folder / "training_state.pt")
    torch.save({"rng": {}}, folder / "training_state_rank0.pt")


@pytest.fixture(scope="module")
def trained() -> DSpineTrainingModel:
    return make_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def state(trained: DSpineTrainingModel) -> dict[str, Tensor]:
    return dict(trained.draft_model.state_dict())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Tensor]) -> Path:
    """A finished run: an older checkpoint of zeros, and the newest one."""
    folder = tmp_path_factory.mktemp("export") / "run"
    save_run(folder, {name: torch.zeros_like(value) for name, value in state.items()}, step=2)
    shutil.move(folder / "tiny-step2", folder.parent / "older")
    shutil.rmtree(folder)
    save_run(folder, state)
    shutil.move(folder.parent / "older", folder / "tiny-step2")
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> dict[str, Path]:
    """Both layouts of the run."""
    folders = {layout: run.parent / layout for layout in LAYOUTS}
    for layout, out in folders.items():
        assert main(["--run", str(run), "--to", layout, "--out", str(out)]) == 0
    return folders


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def damaged(source: Path, out: Path, *, config: Change | None = None, tensors: Change | None = None) -> Path:
    """A copy of an export with its config or its tensors changed in place."""
    shutil.copytree(source, out)
    if config is not None:
        payload = config_of(out)
        config(payload)
        (out / "config.json").write_text(json.dumps(payload), encoding="utf-8")
    if tensors is not None:
        values = load_file(out / "model.safetensors")
        tensors(values)
        save_file(values, out / "model.safetensors", metadata={"format": "pt"})
    return out
