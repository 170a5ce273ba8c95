"""Settings of the method: the ``dspine:`` section of a recipe, and the part of it that a draft carries.

``DSpineSettings`` is the ``dspine_config`` of a draft's config.json, with the names of SpecForge's in-tree DSpine.
``DSpineOptions`` adds what only training needs. Both refuse unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PretrainedConfig

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(gt=0)]


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DSpineSettings(StrictModel):
    """``dspine_config`` of a draft's config.json. Ratios are fractions of all optimizer steps."""

    transfer_rank: Count  # r
    message_size: Count  # a
    top_k: Count = 16  # K
    ce_weight: Fraction = 0.1  # α of §5: α·CE + (1−α)·ℓ1
    alignment_weight: float = Field(default=0.5, ge=0.0)  # the plateau of β
    alignment_warmup_steps: int | None = Field(default=None, ge=0)  # None: the learning rate's warm-up
    curriculum: bool = True  # correct predecessors for some blocks, early in training
    replacement_layers: int = Field(ge=0)  # layers 1..this may receive correct predecessors
    replacement_probability: Fraction = 0.5
    replacement_hold_ratio: Fraction = 1 / 6
    replacement_end_ratio: Fraction = 1 / 3
    candidate_mass_threshold: Fraction = 1e-4
    causal: bool = True  # within a block; False: DFlash's bidirectional blocks
    injection: bool = True  # adjacent causal injection; refinement and curriculum need it
    refinement: bool = True  # last-write refinement, in the loss and in decoding
    alignment: Literal["cosine", "ce", "off"] = "cosine"  # per layer: 1 − cos to the label's code; the label's −log q
    excluded_ids: tuple[int, ...] = ()  # ids below valid_vocab_size that the target never emits
    valid_vocab_size: int | None = Field(default=None, gt=0)  # tokenizer length; later rows are padding

    @model_validator(mode="before")
    @classmethod
    def _fill_in_what_follows(cls, values: Any) -> Any:
        """``injection: off`` alone is enough: refinement and curriculum follow, unless they are asked for."""
        if isinstance(values, dict):
            values = dict(values)
            if values.get("alignment") is False:
                values["alignment"] = "off"  # what YAML makes of the word
            if values.get("injection") is False:
                values.setdefault("refinement", False)
            if values.get("injection") is False or values.get("causal") is False:
                values.setdefault("curriculum", False)
        return values

    @model_validator(mode="after")
    def _check_what_belongs_together(self) -> DSpineSettings:
        if self.refinement and not self.injection:
            raise ValueError("refinement redoes the last layer's injection: with injection off it must be off too")
        if self.curriculum and not (self.injection and self.causal):
            raise ValueError(
                "curriculum: correct predecessors travel by the injection, and a bidirectional block would leak them "
                "to the slots that predict them; it must be off without injection, and without causal"
            )
        if self.replacement_end_ratio < self.replacement_hold_ratio:
            raise ValueError(
                f"replacement_end_ratio={self.replacement_end_ratio} is before replacement_hold_ratio="
                f"{self.replacement_hold_ratio}; give end >= hold"
            )
        return self

    @property
    def has_readouts(self) -> bool:
        """Whether layers project their states into the transfer space; without that there is no code table."""
        return self.injection or self.alignment == "cosine"


class DSpineOptions(DSpineSettings):
    """The ``dspine:`` section of a recipe: the draft's shape, the method, the objective's normalization."""

    num_hidden_layers: Count  # L
    block_size: int = Field(ge=2)  # B = 1 anchor + M proposals
    target_layer_ids: tuple[int, ...] = Field(min_length=1)  # 0-based: "output of layer k", T of them
    intermediate_size: Count | None = None  # None: the target's
    normalization: Literal["separate", "shared"] = "separate"
    normalization_scope: Literal["microbatch", "window"] = "microbatch"  # of the weights in L_ref

    @model_validator(mode="after")
    def _check_the_curriculum(self) -> DSpineOptions:
        layers, reach = self.num_hidden_layers, self.replacement_layers
        if reach > layers:
            raise ValueError(f"replacement_layers={reach}: at most num_hidden_layers={layers}, the draft's layers")
        if not self.curriculum:
            return self
        for name in ("replacement_layers", "replacement_probability", "replacement_end_ratio"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}=0 replaces no predecessor; raise it, or set curriculum: off")
        return self


def settings_of(config: PretrainedConfig) -> DSpineSettings:
    """``dspine_config`` of a draft configuration.

    Raises:
        ValueError: the section is missing (not a DSpine draft) or one of its keys is wrong.
    """
    section = getattr(config, "dspine_config", None)
    if not section:
        raise ValueError("dspine_config is missing from the draft's config: this is not a DSpine draft")
    return DSpineSettings.model_validate(section)
