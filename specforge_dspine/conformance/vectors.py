"""A vector file (docs/vectors.md) as the draft, the target's tables and the padded batch that it describes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from specforge_dspine.formats.reader import load_draft
from specforge_dspine.formats.writer import cast_weight, write_checkpoint
from specforge_dspine.modeling.blocks import Blocks
from specforge_dspine.modeling.draft_config import small_draft_config
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineSettings
from specforge_dspine.modeling.state_dict import READY, TABLE
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.objective.training_model import DSpineTrainingModel

INPUTS = ("weights/", "target/", "inputs/")
EXTRA_TOKENS, EXTRA_BLOCKS = 3, 1  # padding of the batch


class VectorFileError(ValueError):
    """A vector file that cannot be used; the message names the key."""


class Vectors:
    """A vector file and its JSON of scalars, the draft and the padded batch built from them, on ``device``."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        try:
            self.tensors = load_file(path)
        except SafetensorError as error:
            raise VectorFileError(f"{path} is not a safetensors file: {error}") from error
        self.scalars = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        self.dtype = dtype
        self._check_inputs()
        self.draft = self._draft().to(device)
        self.tensors = {name: value.to(device) for name, value in self.tensors.items()}
        self.length = len(self["inputs/input_ids"])
        self.anchors = self["inputs/anchors"]
        self.head = self["target/lm_head"].to(dtype)
        self.model = DSpineTrainingModel(
            self.draft,
            _linear(self.head),
            nn.Embedding.from_pretrained(self["target/embed_tokens"].to(dtype)),
            attention_backend="sdpa",
            num_anchors=len(self.anchors),
            loss_decay_gamma=self.scalars["config"]["gamma"],
            objective_chunk_blocks=1,
            normalization="separate",
        )

    def _check_inputs(self) -> None:
        """Everything is computed from the inputs, so that a bad one would say nothing about any quantity."""
        vocab = len(self["target/lm_head"])
        for name, value in self.tensors.items():
            if name.startswith(INPUTS) and value.is_floating_point() and not torch.isfinite(value).all():
                raise VectorFileError(f"{name} holds a value that is not finite")
        ids = self["inputs/input_ids"]
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise VectorFileError(f"inputs/input_ids holds an id outside the {vocab} rows of target/lm_head")

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def _draft(self) -> DSpineDraftModel:
        """The file's draft with the table of the file's head, by way of an exported checkpoint."""
        c = self.scalars["config"]
        weights = {k.removeprefix("weights/"): v for k, v in self.tensors.items() if k.startswith("weights/")}
        rank, hidden = weights["injection.readouts.0.weight"].shape
        settings = DSpineSettings(
            transfer_rank=rank,
            message_size=len(weights["injection.bias"]),
            top_k=c["K"],
            ce_weight=c["ce_weight"],
            alignment_weight=c["alignment_weight"],
            replacement_layers=c["replacement_layers"],
            replacement_probability=c["replacement_probability"],
            replacement_hold_ratio=c["hold_ratio"],
            replacement_end_ratio=c["end_ratio"],
            candidate_mass_threshold=c["mass_threshold"],
            excluded_ids=tuple(self.scalars["excluded_ids"]),
        )
        taps = weights["fc.weight"].shape[1] // hidden
        config = small_draft_config(
            vocab_size=len(self["target/lm_head"]),
            hidden_size=hidden,
            layers=c["layers"],
            heads=c["heads"],
            kv_heads=c["kv_heads"],
            head_dim=c["head_dim"],
            intermediate_size=len(weights["layers.0.mlp.gate_proj.weight"]),
            eps=c["eps"],
            theta=c["theta"],
            block_size=c["block"],
            target_layer_ids=range(taps),
            num_target_layers=taps + 1,
            mask_token_id=self.scalars["mask_token_id"],
            settings=settings,
        )
        tensors = {name: cast_weight(name, value, self.dtype) for name, value in weights.items()}
        codes = build_transfer_space(self["target/lm_head"], rank).codes
        tensors |= {TABLE: codes, READY: torch.tensor(True)}
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(tensors, config, "sglang", Path(folder) / "draft", self.dtype)
            return load_draft(Path(folder) / "draft").to_model()

    def candidates(self, name: str) -> Tensor:
        """The file's top-K sets [.., K] to compute with. An impossible id becomes a possible one: its own check
        reports it.

        Raises:
            VectorFileError: another shape than one set of K for each row, or for each slot of block 0.
        """
        count = len(self["rows/label"]) if name.startswith("rows/") else int(self.draft.block_size) - 1
        shape = (count, self.draft.settings.top_k)
        if tuple(self[name].shape) != shape:
            raise VectorFileError(f"{name} is {tuple(self[name].shape)}, expected {shape}")
        return self[name].clamp(0, len(self.head) - 1)

    def batch(self, name: str) -> Tensor:
        """``inputs/name`` [S, ..] as row 0 of [2, S + padding, ..]; row 1 is the same reversed."""
        value = self[f"inputs/{name}"]
        value = value.to(self.dtype) if value.is_floating_point() else value
        both = torch.stack([value, value.flip(0)])
        padding = both.new_zeros(2, EXTRA_TOKENS, *both.shape[2:])
        return torch.cat([both, padding], dim=1)

    def blocks(self, *, replace: bool) -> Blocks:
        """The file's blocks and a padding block in row 0; live but unsupervised blocks in row 1."""
        width, device = len(self.anchors) + EXTRA_BLOCKS, self.anchors.device
        anchors = torch.zeros(2, width, dtype=torch.long, device=device)
        keep = torch.zeros_like(anchors, dtype=torch.bool)
        anchors[:, : len(self.anchors)], keep[:, : len(self.anchors)] = self.anchors, True
        replaced = torch.zeros_like(keep)
        replaced[0, : len(self.anchors)] = self["inputs/replace"] & replace
        return Blocks(anchors, keep, replaced)

    def loss_mask(self) -> Tensor:
        """[2, S + padding]; the second sequence supervises nothing."""
        mask = self.batch("loss_mask")
        mask[1] = 0
        return mask


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer
