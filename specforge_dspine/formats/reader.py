"""Reading a draft from disk, strictly."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import Qwen3Config

from specforge_dspine.formats.config_json import LAYOUTS, check_config, read_config
from specforge_dspine.formats.third_party import read_dflash, read_tensors
from specforge_dspine.modeling.draft_config import ARCHITECTURE
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.modeling.state_dict import TABLE, check_tensors
from specforge_dspine.utils.errors import CheckpointError


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Qwen3Config]:
    """Tensors and config of an exported draft of either flavor, checked.

    Raises:
        CheckpointError: a missing, unknown or wrong-shaped tensor, a missing bridge or flag, by name.
    """
    folder = Path(folder)
    payload = read_config(folder)
    flavor = check_config(payload)
    config = Qwen3Config.from_dict(payload | {"architectures": [ARCHITECTURE]})
    tensors = read_tensors(folder, LAYOUTS[flavor].table if settings_of(config).has_readouts else None)
    check_tensors(tensors, config)
    for name, value in tensors.items():
        if name != TABLE and value.is_floating_point() and str(value.dtype) != f"torch.{payload.get('dtype')}":
            raise CheckpointError(f"{name} is {value.dtype}, config.json says dtype={payload.get('dtype')!r}")
    return tensors, config


def load_draft(folder: Path, *, attention: str = "sdpa") -> DSpineDraftModel:
    """A draft of either flavor, in eval mode, in the dtype it was exported in.

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
