"""A recipe resolved against its target and data: what ``--plan`` prints and what the run then does.

samples × epochs → slots = steps · quantum,  quantum = ranks · batch_size · accumulation_steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from specforge.algorithms.registry import AlgorithmRegistration
from specforge.application import resolve_run
from specforge.runtime.data_plane.offline_reader import list_feature_files
from specforge.training.model_loading import resolve_draft_config
from specforge.training.schedule import resolve_online_total_steps, validate_fixed_accumulation_plan
from specforge.utils import get_device_type

from specforge_dspine.model import DSpineDraftModel
from specforge_dspine.recipe import Recipe, RecipeError
from specforge_dspine.registration import dspine_registry
from specforge_dspine.stream.record import Sample, TargetIdentity
from specforge_dspine.stream.source import read_samples


@dataclass(frozen=True)
class Plan:
    """A run that can start: ``steps`` optimizer steps of ``quantum`` samples over ``ranks`` processes."""

    recipe: Recipe
    algorithm: AlgorithmRegistration
    target: TargetIdentity
    draft_config: Any
    ranks: int
    samples: Sequence[Sample]  # streamed runs; empty offline
    files: Sequence[str]  # offline runs; empty streamed
    steps: int  # optimizer steps of this run
    total_steps: int  # horizon of the schedules, ≥ steps

    @property
    def quantum(self) -> int:
        training = self.recipe.host.training
        return self.ranks * training.batch_size * training.accumulation_steps

    @property
    def warmup_steps(self) -> int:
        return int(self.recipe.host.training.warmup_ratio * self.total_steps)

    @property
    def unused(self) -> int:
        """Samples of the last epoch that fill no whole optimizer window."""
        available = max(len(self.samples), len(self.files)) * self.recipe.host.training.num_epochs
        return max(0, available - self.steps * self.quantum)

    def render(self) -> str:
        """The plan as text: topology, layers, sizes, parameter counts, schedule."""
        host, options, draft = self.recipe.host, self.recipe.dspine, meta_draft(self.draft_config)
        training, stream = host.training, self.recipe.stream
        where = "offline features in " + host.data.hidden_states_path if self.files else "streamed from "
        if stream is not None and stream.managed is not None:
            devices = ",".join(map(str, stream.managed.devices)) or "cpu"
            where += f"a server of this run (devices {devices}, tp {stream.managed.tp_size})"
        elif stream is not None:
            where += ", ".join(stream.servers)
        injection = draft.num_injection_parameters()
        total = sum(parameter.numel() for parameter in draft.parameters())
        hold = int(options.replacement_hold_ratio * self.total_steps)
        end = int(options.replacement_end_ratio * self.total_steps)
        alignment = self.warmup_steps if options.alignment_warmup_steps is None else options.alignment_warmup_steps
        lines = {
            "run": f"{host.run_id} in {host.output_dir}",
            "target": f"{self.target.model_path}: {self.target.num_layers} layers, H={self.target.hidden_size}, "
            f"V={self.target.vocab_size}, {self.target.dtype}",
            "taps": f"outputs of layers {', '.join(map(str, self.target.layers))} (0-based) and the final state",
            "features": where,
            "trainer": f"{self.ranks} rank(s) on {get_device_type()}, {training.fsdp_sharding}, "
            f"attention {training.attention_backend}",
            "draft": f"L={options.num_hidden_layers} B={options.block_size} r={options.transfer_rank} "
            f"a={options.message_size} K={options.top_k}, mask id {draft.mask_token_id}",
            "parameters": f"{total:,} trained, of which injection {injection:,}; "
            f"code table {draft.transfer_codes.numel():,} fixed (float32)",
            "batch": f"{training.batch_size} sequences × {training.accumulation_steps} micro-batches × "
            f"{self.ranks} ranks = {self.quantum} a step, ≤ {training.num_anchors} anchors each, "
            f"≤ {host.data.max_length} tokens",
            "data": f"{max(len(self.samples), len(self.files)):,} samples × {training.num_epochs} epochs; "
            f"{self.unused:,} fill no whole step",
            "schedule": f"{self.steps:,} steps of {self.total_steps:,}; lr {training.learning_rate:g}, warm-up "
            f"{self.warmup_steps} steps, then {training.lr_scheduler}; clip {training.max_grad_norm:g}",
            "curriculum": f"p = {options.replacement_probability:g} until step {hold}, 0 from step {end}, "
            f"in layers 1–{options.replacement_layers}",
            "alignment": f"β = {options.alignment_weight:g} after {alignment} steps, times the backbone's CE",
        }
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def meta_draft(draft_config: Any) -> DSpineDraftModel:
    """The draft on the meta device: sizes without memory."""
    with torch.device("meta"):
        return DSpineDraftModel(draft_config)


def make_plan(recipe: Recipe, *, ranks: int) -> Plan:
    """Resolve ``recipe`` for ``ranks`` trainer processes.

    Raises:
        RecipeError: it cannot run as it is; the message says what would.
    """
    host = recipe.host
    _check_device(recipe)
    algorithm = resolve_run(host, dspine_registry(recipe.dspine)).algorithm
    try:
        target = TargetIdentity.from_config(
            host.model.target_model_path, recipe.dspine.target_layer_ids, host.model.torch_dtype
        )
    except ValueError as error:
        raise RecipeError(f"dspine.target_layer_ids or model.target_model_path: {error}") from error
    draft_config = resolve_draft_config(host, provider=algorithm.providers.model.draft_config)
    training = host.training
    quantum = ranks * training.batch_size * training.accumulation_steps
    samples: Sequence[Sample] = ()
    files: Sequence[str] = ()
    if recipe.stream is not None:
        samples = read_samples(
            host.data.prompts_path, max_length=host.data.max_length, max_prompts=host.data.max_prompts
        )
        available = resolve_online_total_steps(
            num_prompts=len(samples),
            prompt_epochs=training.num_epochs,
            dp_size=ranks,
            batch_size=training.batch_size,
            accumulation_steps=training.accumulation_steps,
        )
        if host.runtime.in_flight_low_watermark < quantum:
            raise RecipeError(
                f"runtime.in_flight_low_watermark={host.runtime.in_flight_low_watermark} is below one optimizer "
                f"step of {quantum} samples; set it to at least {quantum}, and the high watermark above"
            )
    else:
        files = list_feature_files(host.data.hidden_states_path)
        if not files:
            raise RecipeError(f"data.hidden_states_path={host.data.hidden_states_path!r} holds no .ckpt files")
        per_rank = -(-len(files) // ranks)
        try:
            validate_fixed_accumulation_plan(
                num_samples=per_rank,
                batch_size=training.batch_size,
                accumulation_steps=training.accumulation_steps,
                num_epochs=training.num_epochs,
                max_steps=training.max_steps,
            )
        except ValueError as error:
            raise RecipeError(str(error)) from error
        available = per_rank // training.batch_size * training.num_epochs // training.accumulation_steps
    steps = min(training.max_steps or available, available)
    if steps < 1:
        raise RecipeError(f"the data yields no optimizer step of {quantum} samples; add data or epochs")
    if training.max_steps and training.max_steps > available:
        raise RecipeError(
            f"training.max_steps={training.max_steps} needs {training.max_steps * quantum} samples; data × epochs "
            f"give {available} steps: raise training.num_epochs"
        )
    total = training.total_steps or steps
    if total < steps:
        raise RecipeError(f"training.total_steps={total} is below the {steps} steps of this run")
    return Plan(recipe, algorithm, target, draft_config, ranks, samples, files, steps, total)


def _check_device(recipe: Recipe) -> None:
    """Two defaults of SpecForge do not exist on a CPU; say so before anything is loaded."""
    if get_device_type() != "cpu":
        return
    training = recipe.host.training
    if training.fsdp_sharding != "NO_SHARD":
        raise RecipeError(f"training.fsdp_sharding={training.fsdp_sharding!r} needs an accelerator; use NO_SHARD")
    if training.attention_backend == "flex_attention":
        raise RecipeError("training.attention_backend='flex_attention' has no CPU backward; use sdpa")
