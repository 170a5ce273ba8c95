"""Configuration of the method: the ``dspine:`` section of a recipe and the draft's own config.json.

``DSpineSettings`` is what a trained draft carries in ``dspine_config`` (names as SpecForge's in-tree
DSpine writes them); ``DSpineOptions`` adds what only training needs. Both refuse unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PretrainedConfig, Qwen3Config

ARCHITECTURE = "DSpineDraftModel"

Scope = Literal["microbatch", "window"]  # a micro-batch, or the optimizer window over all ranks
Alignment = Literal["cosine", "ce", "off"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(gt=0)]


class StrictModel(BaseModel):
    """Refuses unknown keys; a value is never changed after it was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DSpineSettings(StrictModel):
    """``dspine_config`` of a draft's config.json.

    Sizes are counts of features, weights are dimensionless, ratios are fractions of all optimizer steps.
    """

    transfer_rank: Count  # r
    message_size: Count  # a
    top_k: Count = 16  # K
    ce_weight: Fraction = 0.1  # α of §5: α·CE + (1−α)·ℓ1
    alignment_weight: float = Field(default=0.5, ge=0.0)  # the plateau of β
    alignment_warmup_steps: int | None = Field(default=None, ge=0)  # None: the learning rate's warm-up
    curriculum: bool = True  # right predecessors for some blocks, early in training
    replacement_layers: int = Field(ge=0)  # layers 1..this may receive right predecessors
    replacement_probability: Fraction = 0.5
    replacement_hold_ratio: Fraction = 1 / 6
    replacement_end_ratio: Fraction = 1 / 3
    candidate_mass_threshold: Fraction = 1e-4
    causal: bool = True  # within a block; False: DFlash's bidirectional blocks
    injection: bool = True  # adjacent causal injection; without it there is nothing to refine or to replace
    refinement: bool = True  # last-write refinement, in the loss and in decoding
    alignment: Alignment = "cosine"  # of every layer: 1 − cos to the label's code; "ce": the label's −log q; or none
    excluded_ids: tuple[int, ...] = ()  # ids below valid_vocab_size that the target never emits
    valid_vocab_size: int | None = Field(default=None, gt=0)  # tokenizer length; later rows are padding

    @model_validator(mode="before")
    @classmethod
    def _what_goes_with_the_injection(cls, values: Any) -> Any:
        """``injection: off`` alone is enough: refinement and curriculum go with it, unless they are asked for."""
        if isinstance(values, dict):
            values = dict(values)
            if values.get("alignment") is False:
                values["alignment"] = "off"  # what YAML makes of the word
            if values.get("injection") is False:
                values.setdefault("refinement", False)
            if values.get("injection") is False or values.get("causal") is False:
                values.setdefault("curriculum", False)
        return values

    @property
    def has_readouts(self) -> bool:
        """Does any layer read its states into the transfer space? Without that there is no code table either."""
        return self.injection or self.alignment == "cosine"

    @model_validator(mode="after")
    def _nothing_without_the_injection(self) -> DSpineSettings:
        if self.refinement and not self.injection:
            raise ValueError("refinement redoes the last layer's injection: with injection off it must be off too")
        if self.curriculum and not (self.injection and self.causal):
            raise ValueError(
                "curriculum: right predecessors travel by the injection, and in a bidirectional block they would "
                "reach the slots that are to predict them; it must be off without injection, and without causal"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_ends_after_it_holds(self) -> DSpineSettings:
        if self.replacement_end_ratio < self.replacement_hold_ratio:
            raise ValueError(
                f"replacement_end_ratio={self.replacement_end_ratio} is before replacement_hold_ratio="
                f"{self.replacement_hold_ratio}; give end >= hold"
            )
        return self


class DSpineOptions(DSpineSettings):
    """The ``dspine:`` section of a recipe: the draft's shape, the method, the objective's normalization."""

    num_hidden_layers: Count  # L
    block_size: int = Field(ge=2)  # B = 1 anchor + M proposals
    target_layer_ids: tuple[int, ...] = Field(min_length=1)  # 0-based: "output of layer k", T of them
    intermediate_size: Count | None = None  # None: the target's
    normalization: Literal["separate", "shared"] = "separate"
    normalization_scope: Scope = "microbatch"  # of W, W_c and W_m in the refinement's two ratios

    def settings(self) -> dict[str, Any]:
        """The part that travels with the draft as ``dspine_config``."""
        return self.model_dump(include=set(DSpineSettings.model_fields), mode="json")


def settings_of(config: PretrainedConfig) -> DSpineSettings:
    """``dspine_config`` of a draft configuration.

    Raises:
        ValueError: the section is missing (not a DSpine draft) or one of its keys is wrong.
    """
    section = getattr(config, "dspine_config", None)
    if not section:
        raise ValueError("dspine_config is missing from the draft's config: this is not a DSpine draft")
    return DSpineSettings.model_validate(section)


def complete_draft_config(
    payload: dict[str, Any], target: Any, options: DSpineOptions, mask_id: int, emittable: tuple[list[int], int]
) -> None:
    """Turn the target-derived ``payload`` into a DSpine draft configuration, in place.

    Head counts, sizes and RoPE are the target's; depth, block, taps and rank are the recipe's. ``target`` is
    the target's text config; ``emittable`` the ids it never generates and the rows its tokenizer reaches, used
    where the recipe names none.

    Raises:
        ValueError: the transfer rank exceeds the hidden size, an id the vocabulary, or K what the target can emit.
    """
    hidden, vocab = int(target.hidden_size), int(payload["vocab_size"])
    if options.transfer_rank > hidden:
        raise ValueError(
            f"dspine.transfer_rank={options.transfer_rank}: at most the target's hidden size, {hidden}, is possible"
        )
    layers = options.num_hidden_layers
    settings = complete_settings(options, mask_id, vocab, emittable)
    payload.update(
        architectures=[ARCHITECTURE],
        block_size=options.block_size,
        is_causal=options.causal,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_target_layers=int(target.num_hidden_layers),
        head_dim=getattr(target, "head_dim", None) or hidden // int(target.num_attention_heads),
        rope_theta=rope_theta(target),
        rope_parameters=dict(getattr(target, "rope_parameters", None) or {"rope_type": "default"})
        | {"rope_theta": rope_theta(target)},
        hidden_act="silu",  # the draft's layers are Qwen3's, whatever the target's are
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        dflash_config={
            "mask_token_id": mask_id,
            "target_layer_ids": list(options.target_layer_ids),
            "block_size": options.block_size,
            "causal": options.causal,
        },
        dspine_config=settings,
    )
    payload.pop("rope_scaling", None)  # rope_parameters is its successor; one of them, not two
    if options.intermediate_size is not None:
        payload["intermediate_size"] = options.intermediate_size


def complete_settings(
    options: DSpineOptions, mask_id: int, vocab: int, emittable: tuple[list[int], int]
) -> dict[str, Any]:
    """``dspine_config`` with the ids that decoding removes filled in, the mask among them.

    ``vocab`` V rows; ``emittable`` as for ``complete_draft_config``.

    Raises:
        ValueError: an id outside the V rows, or fewer emittable ids than K candidates.
    """
    settings = options.settings()
    settings["excluded_ids"] = sorted({mask_id, *(options.excluded_ids or emittable[0])})
    settings["valid_vocab_size"] = options.valid_vocab_size or emittable[1]
    check_vocabulary(DSpineSettings.model_validate(settings), vocab)
    return settings


def match_draft_config(config: Any, options: DSpineOptions, settings: dict[str, Any]) -> None:
    """Make a draft configuration that came with weights (a warm start) agree with the recipe, in place.

    The draft's shape must be the recipe's; ``settings`` (``complete_settings``) replace the ones it was trained
    with; the flags that engines read are set.

    Raises:
        ValueError: a size or the tapped layers differ, with both values.
    """
    dflash, before = config.dflash_config, settings_of(config)
    pairs = {
        "num_hidden_layers": (options.num_hidden_layers, config.num_hidden_layers),
        "block_size": (options.block_size, config.block_size),
        "target_layer_ids": (list(options.target_layer_ids), list(dflash["target_layer_ids"])),
        "transfer_rank": (options.transfer_rank, before.transfer_rank),
        "message_size": (options.message_size, before.message_size),
        "intermediate_size": (options.intermediate_size or config.intermediate_size, config.intermediate_size),
        "causal": (options.causal, before.causal),
        "injection": (options.injection, before.injection),
        "readouts": (options.has_readouts, before.has_readouts),
    }
    for name, (wanted, found) in pairs.items():
        if wanted != found:
            raise ValueError(f"dspine.{name}={wanted}: the draft to start from has {found}; give that")
    config.is_causal = options.causal
    config.dflash_config = dict(dflash) | {"block_size": config.block_size, "causal": options.causal}
    config.dspine_config = settings


def check_vocabulary(settings: DSpineSettings, vocab: int) -> None:
    """Do ``excluded_ids``, ``valid_vocab_size`` and K fit a head of ``vocab`` V rows?

    Raises:
        ValueError: with the key and its value.
    """
    valid = settings.valid_vocab_size or vocab
    if valid > vocab:
        raise ValueError(f"valid_vocab_size={valid} exceeds the {vocab} rows of the target's head")
    if outside := [k for k in settings.excluded_ids if not 0 <= k < vocab]:
        raise ValueError(f"excluded_ids={outside}: the target's head has rows 0 to {vocab - 1}")
    left = valid - len({k for k in settings.excluded_ids if k < valid})
    if settings.top_k > left:
        raise ValueError(f"top_k={settings.top_k} exceeds the {left} ids that the target can emit")


def rope_theta(config: Any) -> float:
    """RoPE base of a config in either spelling (``rope_theta``, or ``rope_parameters`` since transformers 5)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        raise ValueError("rope_theta: the target's config gives none; DSpine's draft layers need a RoPE base")
    return float(theta)


def small_draft_config(**overrides: Any) -> Qwen3Config:
    """A draft configuration from plain sizes, for vector files and tests: no target needed.

    Keyword arguments: ``vocab_size, hidden_size, layers, heads, kv_heads, head_dim, intermediate_size, eps,
    theta, block_size, target_layer_ids, num_target_layers, mask_token_id, settings`` (a ``DSpineSettings``).
    """
    o = overrides
    settings = o["settings"].model_dump(mode="json")
    settings["valid_vocab_size"] = settings["valid_vocab_size"] or o["vocab_size"]
    return Qwen3Config.from_dict(
        {
            "architectures": [ARCHITECTURE],
            "vocab_size": o["vocab_size"],
            "hidden_size": o["hidden_size"],
            "num_hidden_layers": o["layers"],
            "num_attention_heads": o["heads"],
            "num_key_value_heads": o["kv_heads"],
            "head_dim": o["head_dim"],
            "intermediate_size": o["intermediate_size"],
            "rms_norm_eps": o["eps"],
            "rope_parameters": {"rope_type": "default", "rope_theta": o["theta"]},
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * o["layers"],
            "block_size": o["block_size"],
            "is_causal": o["settings"].causal,
            "num_target_layers": o["num_target_layers"],
            "dflash_config": {
                "mask_token_id": o["mask_token_id"],
                "target_layer_ids": list(o["target_layer_ids"]),
                "block_size": o["block_size"],
                "causal": o["settings"].causal,
            },
            "dspine_config": settings,
        }
    )
