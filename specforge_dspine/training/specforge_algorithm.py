"""DSpine as an algorithm of SpecForge: its draft, step and model beside DSpark's features, added to the registry.

The features are input_ids, loss_mask, hidden_states (the tapped layers) and target_last_hidden_states (final,
post-norm). The providers carry the recipe's ``dspine:`` section.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.algorithms.common.defaults import empty_options
from specforge.algorithms.common.dflash_family_data import (
    build_dspark_collator,
    build_dspark_offline_reader,
    normalize_dspark_offline_sample,
)
from specforge.algorithms.common.providers import (
    AlgorithmProviders,
    DraftConfigProvider,
    TargetDerivedDraftDefaults,
    make_registration,
)
from specforge.algorithms.contracts import DraftRequirement
from specforge.algorithms.model_providers import build_registered_draft
from specforge.algorithms.registry import AlgorithmRegistry
from specforge.config import Config
from transformers import AutoTokenizer, PretrainedConfig

from specforge_dspine.modeling.draft_config import (
    ARCHITECTURE,
    complete_draft_config,
    complete_settings,
    match_draft_config,
)
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.settings import DSpineOptions, settings_of
from specforge_dspine.modeling.transfer_space import cached_transfer_space
from specforge_dspine.modeling.vocabulary import OutputVocabulary, output_vocabulary, resolve_mask_token
from specforge_dspine.objective.training_model import DSpineTrainingModel
from specforge_dspine.training.distributed import on_every_rank
from specforge_dspine.training.recipe import ALGORITHM
from specforge_dspine.training.resume_contract import resume_contract
from specforge_dspine.training.specforge_internals import build_dflash_family_model
from specforge_dspine.training.strategy import DSpineTrainStrategy

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 31  # streamed records were cut to data.max_length when their prompts were read


def populate_draft_config(
    options: DSpineOptions, payload: dict[str, Any], target: PretrainedConfig, config: Config
) -> None:
    """Fill in the recipe's draft: SpecForge's seam for draft configs derived from the target."""
    mask_id, ids = target_vocabulary(config, int(payload["vocab_size"]), config.model.mask_token_id)
    complete_draft_config(payload, target, options, mask_id, ids)


def apply_recipe(options: DSpineOptions, config: Config, draft_config: PretrainedConfig) -> None:
    """Check that a draft config that came with weights fits the recipe (SpecForge's hook ``apply_overrides``)."""
    if not (config.model.draft_model_config or config.model.draft_checkpoint_path):
        return  # populate_draft_config made it
    settings_of(draft_config)
    dflash = getattr(draft_config, "dflash_config", None) or {}
    if missing := {"mask_token_id", "target_layer_ids"} - dflash.keys():
        raise ValueError(f"dflash_config of the draft to start from lacks {', '.join(sorted(missing))}")
    found, wanted = dflash["mask_token_id"], config.model.mask_token_id
    if wanted not in (None, found):
        raise ValueError(f"model.mask_token_id={wanted}: the draft to start from was trained with {found}; give that")
    rows = int(draft_config.vocab_size)
    mask_id, ids = target_vocabulary(config, rows, found)
    match_draft_config(draft_config, options, complete_settings(options, mask_id, rows, ids))


def target_vocabulary(config: Config, rows: int, mask_id: int | None) -> tuple[int, OutputVocabulary]:
    """Return the mask id, and what the target can emit (``vocabulary.output_vocabulary``), from its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.target_model_path,
        cache_dir=config.model.cache_dir,
        trust_remote_code=config.model.trust_remote_code,
    )
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one up where the files are missing
        raise ValueError(
            f"model.target_model_path={config.model.target_model_path!r} holds no tokenizer; save the target's there"
        )
    mask_id = resolve_mask_token(tokenizer, rows, mask_id)
    return mask_id, output_vocabulary(tokenizer, rows, mask_id)


def build_training_model(
    options: DSpineOptions,
    config: Config,
    draft: DSpineDraftModel,
    _draft_config: PretrainedConfig,
    _target_config: PretrainedConfig,
    tokenizer: Any,
) -> Any:
    """Build the training model on its device, with the transfer space of the target's head installed."""

    def assemble(parts: dict[str, Any]) -> DSpineTrainingModel:
        model = DSpineTrainingModel(
            parts["draft_model"],
            parts["target_lm_head"],
            parts["target_embed_tokens"],
            attention_backend=parts["attention_backend"],
            num_anchors=parts["num_anchors"],
            loss_decay_gamma=parts["loss_decay_gamma"],
            objective_chunk_blocks=parts["objective_chunk_blocks"],
            normalization=options.normalization,
            normalization_scope=options.normalization_scope,
        )
        if options.has_readouts and not bool(draft.transfer_ready):  # a draft to start from has its table
            install_transfer_space(draft, model.lm_head.weight, config.data.cache_dir)
        return model

    if options.curriculum and options.replacement_layers >= options.num_hidden_layers:
        logger.warning(
            "dspine.replacement_layers=%d covers all %d layers: the last layer's features never stand alone",
            options.replacement_layers,
            options.num_hidden_layers,
        )
    return build_dflash_family_model(config, draft, tokenizer, assemble)


def install_transfer_space(draft: DSpineDraftModel, head: torch.Tensor, cache_dir: str) -> None:
    """Give a new draft the table of ``head`` E [V, H] (§3): rank 0 computes it, the others read the cached file."""
    fetch = partial(cached_transfer_space, head, draft.settings.transfer_rank, cache_dir)
    on_every_rank(lambda: bool(fetch()))
    draft.set_transfer_space(fetch())


def build_streaming_collator() -> Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Return a collator of streamed records: normalize them as offline feature files, then pad the batch."""
    collate = build_dspark_collator()
    return lambda records: collate([normalize_dspark_offline_sample(r, UNLIMITED) for r in records])


def dspine_registry(options: DSpineOptions) -> AlgorithmRegistry:
    """Return SpecForge's built-in algorithms, and DSpark's registration with our draft, step and model added."""
    registry = builtin_algorithm_registry()
    dspark = registry.resolve("dspark")
    draft = DraftRequirement(compatible_architectures={ARCHITECTURE}, default_architecture=ARCHITECTURE)
    (offline,), (streaming,) = dspark.providers.offline, dspark.providers.server_streaming
    step = replace(
        dspark.providers.step,
        build=lambda model, *, target_head=None, seed, warmup_ratio: DSpineTrainStrategy(
            model, seed=seed, warmup_ratio=warmup_ratio
        ),
        options=lambda config: {
            **empty_options(config),
            "seed": config.training.seed,
            "warmup_ratio": config.training.warmup_ratio,
        },
        resume_contract=partial(resume_contract, options),
    )
    model = replace(
        dspark.providers.model,
        draft_config=DraftConfigProvider(
            architecture=ARCHITECTURE,
            target_defaults=TargetDerivedDraftDefaults(
                model_type="qwen3",
                num_hidden_layers=options.num_hidden_layers,
                populate=partial(populate_draft_config, options),
            ),
            apply_overrides=partial(apply_recipe, options),
        ),
        build_draft=build_registered_draft,
        build_training_model=partial(build_training_model, options),
        resolve_capture_layers=lambda *_: list(options.target_layer_ids),
        minimum_loss_tokens=lambda _config, _draft: 2,
        needs_input_tools=lambda _config, _draft: False,
        default_dataloader_num_workers=2,
    )
    providers = AlgorithmProviders(
        algorithm_name=ALGORITHM,
        step=step,
        model=model,
        offline=(
            replace(
                offline,
                capture_layout=replace(offline.capture_layout, capture_method=ALGORITHM),
                build_reader=partial(build_dspark_offline_reader, ALGORITHM),
            ),
        ),
        server_streaming=(replace(streaming, capture_method=ALGORITHM, build_collator=build_streaming_collator),),
    )
    return registry.with_registration(make_registration(replace(dspark.spec, name=ALGORITHM, draft=draft), providers))
