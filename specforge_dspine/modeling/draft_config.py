"""A draft's config.json: completed from its target, matched to a recipe, or made from plain sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import Qwen3Config

from specforge_dspine.modeling.settings import DSpineOptions, DSpineSettings, settings_of
from specforge_dspine.modeling.vocabulary import OutputVocabulary

ARCHITECTURE = "DSpineDraftModel"
ROPE_OF_THE_TARGET = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Parts of a target's RoPE that the draft's layers do not have: they rotate whole heads, by positions of text."""


def complete_draft_config(
    payload: dict[str, Any], target: Any, options: DSpineOptions, mask_id: int, vocabulary: OutputVocabulary
) -> None:
    """Turn the target-derived ``payload`` into a DSpine draft configuration, in place.

    Head counts, sizes and RoPE are those of ``target``, a text config; depth, block, taps and rank are the recipe's.
    ``vocabulary`` fills in what the recipe does not say.

    Raises:
        ValueError: the transfer rank exceeds the hidden size, an id the vocabulary, or K what the target can emit.
    """
    hidden, vocab = int(target.hidden_size), int(payload["vocab_size"])
    if options.transfer_rank > hidden:
        raise ValueError(
            f"dspine.transfer_rank={options.transfer_rank}: at most the target's hidden size, {hidden}, is possible"
        )
    given = getattr(target, "rope_parameters", None) or {}
    rope = {key: value for key, value in given.items() if key not in ROPE_OF_THE_TARGET and value is not None}
    payload.update(
        block_fields(options, options.num_hidden_layers, options.block_size, options.target_layer_ids, mask_id),
        dspine_config=complete_settings(options, mask_id, vocab, vocabulary),
        num_target_layers=int(target.num_hidden_layers),
        head_dim=getattr(target, "head_dim", None) or hidden // int(target.num_attention_heads),
        rope_theta=rope_theta(target),
        rope_parameters={"rope_type": "default"} | rope | {"rope_theta": rope_theta(target)},
        hidden_act="silu",  # the draft's layers are Qwen3's, whatever the target's are
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
    )
    for name in ("rope_scaling", *ROPE_OF_THE_TARGET):  # rope_parameters is the first one's successor
        payload.pop(name, None)
    if options.intermediate_size is not None:
        payload["intermediate_size"] = options.intermediate_size


def block_fields(
    method: DSpineSettings, layers: int, block_size: int, target_layer_ids: Iterable[int], mask_token_id: int
) -> dict[str, Any]:
    """The fields of a draft's config that say how it drafts a block, wherever its sizes come from."""
    return {
        "architectures": [ARCHITECTURE],
        "block_size": block_size,
        "is_causal": method.causal,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(target_layer_ids),
            "block_size": block_size,
            "causal": method.causal,
        },
    }


def complete_settings(
    options: DSpineOptions, mask_id: int, vocab: int, vocabulary: OutputVocabulary
) -> dict[str, Any]:
    """``dspine_config`` with the ids that decoding removes filled in, the mask among them. ``vocab`` is V.

    Raises:
        ValueError: an id outside the V rows, or fewer ids to propose than K candidates.
    """
    settings = options.model_dump(include=set(DSpineSettings.model_fields), mode="json")
    settings["excluded_ids"] = sorted({mask_id, *(options.excluded_ids or vocabulary.excluded_ids)})
    settings["valid_vocab_size"] = options.valid_vocab_size or vocabulary.valid_size
    check_vocabulary(DSpineSettings.model_validate(settings), vocab)
    return settings


def match_draft_config(config: Any, options: DSpineOptions, settings: dict[str, Any]) -> None:
    """Make the configuration of a draft that training starts from agree with the recipe, in place.

    Its shape must be the recipe's; ``settings`` (of ``complete_settings``) replace the ones it was trained with.

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
    config.is_causal = options.causal  # this and the next are what engines read
    config.dflash_config = dict(dflash) | {"block_size": config.block_size, "causal": options.causal}
    config.dspine_config = settings


def check_vocabulary(settings: DSpineSettings, vocab: int) -> None:
    """Check ``excluded_ids``, ``valid_vocab_size`` and K against a head of ``vocab`` V rows.

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


def small_draft_config(
    *,
    layers: int,
    block_size: int,
    target_layer_ids: Iterable[int],
    mask_token_id: int,
    theta: float,
    settings: DSpineSettings,
    **sizes: Any,
) -> Qwen3Config:
    """A draft configuration for vector files, benchmarks and tests, without a target; ``sizes`` as in Qwen3Config."""
    fields = block_fields(settings, layers, block_size, target_layer_ids, mask_token_id) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
        "dspine_config": settings.model_dump(mode="json"),
        **sizes,
    }
    fields["dspine_config"]["valid_vocab_size"] = settings.valid_vocab_size or sizes["vocab_size"]
    return Qwen3Config.from_dict(fields)
