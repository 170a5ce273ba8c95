"""A vector file (docs/vectors.md) as a draft, the target's tables, and a padded batch."""

from __future__ import annotations

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
from specforge_dspine.utils.errors import InvalidFileError
from specforge_dspine.utils.files import read_json

INPUTS = ("weights/", "target/", "inputs/")
EXTRA_TOKENS, EXTRA_BLOCKS = 3, 1  # padding of the batch


class Vectors:
    """A vector file with its scalars, and the draft and the padded batch built from them, on ``device``."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        try:
            self.tensors = load_file(path)
        except SafetensorError as error:
            raise InvalidFileError(f"{path} is not a safetensors file: {error}") from error
        self.scalars = read_json(path.with_suffix(".json"))
        self.dtype = dtype
        self._check_inputs()
        self.draft = self._draft().to(device)
        self.tensors = {name: value.to(device) for name, value in self.tensors.items()}
        self.anchors = self["inputs/anchors"]
        self.head = self["target/lm_head"].to(dtype)
        lm_head = nn.Linear(self.head.shape[1], self.head.shape[0], bias=False)
        lm_head.weight = nn.Parameter(self.head)
        self.model = DSpineTrainingModel(
            self.draft,
            lm_head,
            nn.Embedding.from_pretrained(self["target/embed_tokens"].to(dtype)),
            attention_backend="sdpa",
            num_anchors=len(self.anchors),
            loss_decay_gamma=self.scalars["config"]["gamma"],
            objective_chunk_blocks=1,
            normalization="separate",
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def _check_inputs(self) -> None:
        """Refuse invalid inputs: every quantity follows from them, and its check would mean nothing."""
        vocab = len(self["target/lm_head"])
        for name, value in self.tensors.items():
            if name.startswith(INPUTS) and value.is_floating_point() and not torch.isfinite(value).all():
                raise InvalidFileError(f"{name} holds a value that is not finite")
        ids = self["inputs/input_ids"]
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise InvalidFileError(f"inputs/input_ids holds an id outside the {vocab} rows of target/lm_head")

    def _draft(self) -> DSpineDraftModel:
        """The file's draft with the code table of the file's head, by way of an exported checkpoint."""
        c = self.scalars["config"]
        weights = {k.removeprefix("weights/"): v for k, v in self.tensors.items() if k.startswith("weights/")}
        rank, hidden = weights["injection.readouts.0.weight"].shape
        taps = weights["fc.weight"].shape[1] // hidden
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
        config = small_draft_config(
            **{name: c[name] for name in ("layers", "head_dim", "theta")},
            num_attention_heads=c["heads"],
            num_key_value_heads=c["kv_heads"],
            rms_norm_eps=c["eps"],
            vocab_size=len(self["target/lm_head"]),
            hidden_size=hidden,
            intermediate_size=len(weights["layers.0.mlp.gate_proj.weight"]),
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
        """The file's top-K sets [.., K] to compute with, one per supervised position, or per slot of block 0.

        An impossible id becomes a possible one, because its own check reports it.
        """
        count = len(self["rows/label"]) if name.startswith("rows/") else int(self.draft.block_size) - 1
        shape = (count, self.draft.settings.top_k)
        if tuple(self[name].shape) != shape:
            raise InvalidFileError(f"{name} is {tuple(self[name].shape)}, expected {shape}")
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
        count, width = len(self.anchors), len(self.anchors) + EXTRA_BLOCKS
        anchors = torch.zeros(2, width, dtype=torch.long, device=self.anchors.device)
        keep = torch.zeros_like(anchors, dtype=torch.bool)
        anchors[:, :count], keep[:, :count] = self.anchors, True
        replaced = torch.zeros_like(keep)
        replaced[0, :count] = self["inputs/replace"] & replace
        return Blocks(anchors, keep, replaced)

    def loss_mask(self) -> Tensor:
        """Loss mask [2, S + padding]; the second sequence supervises nothing."""
        mask = self.batch("loss_mask")
        mask[1] = 0
        return mask
