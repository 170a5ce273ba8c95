"""A recipe resolved against its target and data: what ``--plan`` prints and what the run then does.

samples × epochs → slots = steps · quantum,  quantum = ranks · batch_size · accumulation_steps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specforge.algorithms.registry import AlgorithmRegistration
from specforge.application import resolve_run
from specforge.modeling.target.target_utils import load_target_config
from specforge.runtime.data_plane.offline_reader import list_feature_files
from specforge.training.model_loading import resolve_draft_config
from specforge.training.schedule import validate_fixed_accumulation_plan
from specforge.utils import get_device_type

from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.streaming.feature_folder import FeatureFolderError, check_features, feature_name
from specforge_dspine.streaming.record import Sample, TargetIdentity
from specforge_dspine.training.capture_source import read_samples
from specforge_dspine.training.recipe import Recipe
from specforge_dspine.training.specforge_algorithm import dspine_registry
from specforge_dspine.utils.errors import RecipeError


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
    heldout_files: Sequence[str]  # of heldout.hidden_states_path; empty without that section
    steps: int  # optimizer steps of this run
    total_steps: int  # horizon of the schedules, ≥ steps

    @property
    def quantum(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        training = self.recipe.host.training
        return self.ranks * training.batch_size * training.accumulation_steps

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the learning rate's warm-up, as SpecForge counts them."""
        return int(self.recipe.host.training.warmup_ratio * self.total_steps)

    @property
    def available(self) -> int:
        """Samples × epochs."""
        return max(len(self.samples), len(self.files)) * self.recipe.host.training.num_epochs

    @property
    def remainder(self) -> int:
        """Samples of the last epoch that fill no whole optimizer window, and are not trained on."""
        return self.available % self.quantum

    @property
    def not_reached(self) -> int:
        """Samples, in all epochs, that ``training.max_steps`` stops short of."""
        return self.available - self.remainder - self.steps * self.quantum

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
            f"code table {draft.config.vocab_size * options.transfer_rank * options.has_readouts:,} fixed (float32)",
            "batch": f"{training.batch_size} sequences × {training.accumulation_steps} micro-batches × "
            f"{self.ranks} ranks = {self.quantum} a step, ≤ {training.num_anchors} anchors each, "
            f"≤ {host.data.max_length} tokens",
            "data": f"{max(len(self.samples), len(self.files)):,} samples × {training.num_epochs} epochs; "
            f"{self.remainder:,} fill no whole step, {self.not_reached:,} lie beyond max_steps",
            "schedule": f"{self.steps:,} steps of {self.total_steps:,}; lr {training.learning_rate:g}, warm-up "
            f"{self.warmup_steps} steps, then {training.lr_scheduler}; clip {training.max_grad_norm:g}",
            **method(self),
        }
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def method(plan: Plan) -> dict[str, str]:
    """What of the method is on, and its schedules, as lines of the plan."""
    options, total = plan.recipe.dspine, plan.total_steps
    on = [name for name in ("injection", "refinement") if getattr(options, name)]
    blocks = "block-causal" if options.causal else "bidirectional blocks"
    warmup = plan.warmup_steps if options.alignment_warmup_steps is None else options.alignment_warmup_steps
    lines = {
        "method": ", ".join([blocks, *on, f"α = {options.ce_weight:g}"])
        + f"; {options.normalization} weights per {options.normalization_scope}",
        "curriculum": "off",
        "alignment": "off",
    }
    if options.curriculum:
        hold, end = int(options.replacement_hold_ratio * total), int(options.replacement_end_ratio * total)
        lines["curriculum"] = (
            f"p = {options.replacement_probability:g} until step {hold}, 0 from step {end}, "
            f"in layers 1–{options.replacement_layers}"
        )
    if options.alignment != "off":
        kind = {"cosine": "cosine", "ce": "token CE"}[options.alignment]
        lines["alignment"] = f"{kind}, β = {options.alignment_weight:g} after {warmup} steps, times the backbone's CE"
    if plan.recipe.heldout is not None:
        lines["held out"] = f"{len(plan.heldout_files):,} samples every {plan.recipe.heldout.interval} steps"
    return lines


def meta_draft(draft_config: Any) -> DSpineDraftModel:
    """The draft on the meta device: sizes without memory."""
    with torch.device("meta"):
        return DSpineDraftModel(draft_config)


@contextmanager
def refused(where: str) -> Iterator[None]:
    """What a library refuses as an error of the recipe, which says what the recipe's author can change."""
    try:
        yield
    except RecipeError:
        raise
    except (ValueError, OSError) as error:
        raise RecipeError(f"{where}: {' '.join(str(error).split())}") from error


def check_path(key: str, path: str | None) -> None:
    """A model may be a folder or a name on the hub; say so at once where only a folder can be meant.

    Raises:
        RecipeError: ``path`` is absolute, or in a folder that exists here, and does not exist itself.
    """
    if not path or Path(path).exists():
        return
    folder = Path(path).parent
    if Path(path).is_absolute() or path.startswith((".", "~")) or (folder != Path() and folder.is_dir()):
        raise RecipeError(
            f"{key}={path!r}: no such folder; give one that holds a model, or a model's name on the hub"
        )


def make_plan(recipe: Recipe, *, ranks: int) -> Plan:
    """Resolve ``recipe`` for ``ranks`` trainer processes.

    Raises:
        RecipeError: it cannot run as it is; the message says what would.
    """
    host, training = recipe.host, recipe.host.training
    _check_device(recipe)
    for name in ("target_model_path", "draft_checkpoint_path", "draft_model_config"):
        check_path(f"model.{name}", getattr(host.model, name))
    with refused("training"):
        algorithm = resolve_run(host, dspine_registry(recipe.dspine)).algorithm
    with refused(f"model.target_model_path={host.model.target_model_path!r}"):
        load_target_config(
            host.model.target_model_path,
            cache_dir=host.model.cache_dir,
            trust_remote_code=host.model.trust_remote_code,
        )
    with refused("dspine.target_layer_ids"):
        target = TargetIdentity.from_config(
            host.model.target_model_path, recipe.dspine.target_layer_ids, host.model.torch_dtype
        )
    with refused("the draft's configuration"):
        draft_config = resolve_draft_config(host, provider=algorithm.providers.model.draft_config)
    for name in ("hidden_size", "vocab_size"):
        if getattr(draft_config, name) != getattr(target, name):
            raise RecipeError(
                f"the draft to start from has {name}={getattr(draft_config, name)}, the target "
                f"{getattr(target, name)}: it was trained for another target"
            )
    managed = recipe.stream.managed if recipe.stream is not None else None
    if managed is not None and ranks > 1 and managed.startup_timeout_s >= 60 * training.dist_timeout:
        raise RecipeError(
            f"training.dist_timeout={training.dist_timeout} minutes: the other ranks would give up while the server "
            f"starts (stream.managed.startup_timeout_s={managed.startup_timeout_s:g}); make it longer than that"
        )
    if recipe.stream is None and host.data.max_prompts is not None:
        raise RecipeError(
            f"data.max_prompts={host.data.max_prompts}: not read with data.hidden_states_path; remove it"
        )
    quantum = ranks * training.batch_size * training.accumulation_steps
    samples: Sequence[Sample] = ()
    files: Sequence[str] = ()
    if recipe.stream is not None:
        with refused(f"data.prompts_path={host.data.prompts_path!r}"):
            samples = read_samples(
                host.data.prompts_path, max_length=host.data.max_length, max_prompts=host.data.max_prompts
            )
        available = len(samples) * training.num_epochs // quantum
    else:
        files = features_in("data.hidden_states_path", host.data.hidden_states_path, target)
        if left := len(files) % (ranks * training.batch_size):
            raise RecipeError(
                f"training.batch_size={training.batch_size} on {ranks} rank(s): of {len(files)} feature files {left} "
                "would fill no batch, and be dropped or repeated in every epoch; choose a batch_size that divides "
                "them, or take files away"
            )
        per_rank = len(files) // ranks
        with refused("training"):
            validate_fixed_accumulation_plan(
                num_samples=per_rank,
                batch_size=training.batch_size,
                accumulation_steps=training.accumulation_steps,
                num_epochs=training.num_epochs,
                max_steps=training.max_steps,
            )
        available = per_rank // training.batch_size * training.num_epochs // training.accumulation_steps
    heldout_files: Sequence[str] = ()
    if recipe.heldout is not None:
        heldout_files = features_in("heldout.hidden_states_path", recipe.heldout.hidden_states_path, target)
        training_names = {feature_name(path) for path in files} | {sample.name for sample in samples}
        if shared := training_names & {feature_name(path) for path in heldout_files}:
            raise RecipeError(
                f"heldout.hidden_states_path={recipe.heldout.hidden_states_path!r} holds {len(shared)} of the "
                f"training samples, {sorted(shared)[0]} among them; capture others"
            )
    steps = training.max_steps or available
    if available < 1:
        raise RecipeError(
            f"the data yields no optimizer step: {max(len(samples), len(files))} samples × {training.num_epochs} "
            f"epochs, and one step takes {quantum}; add data, or lower training.batch_size or accumulation_steps"
        )
    if steps > available:
        raise RecipeError(
            f"training.max_steps={steps} needs {steps * quantum} samples; data × epochs give {available} steps: "
            "raise training.num_epochs, or give at most that"
        )
    watermark = host.runtime.in_flight_low_watermark
    if recipe.stream is not None and watermark < quantum:
        raise RecipeError(
            f"runtime.in_flight_low_watermark={watermark} is below one optimizer step of {quantum} samples; set "
            f"it to at least {quantum}, and the high watermark not below it"
        )
    total = training.total_steps or steps
    if total < steps:
        raise RecipeError(f"training.total_steps={total} is below the {steps} steps of this run")
    plan = Plan(recipe, algorithm, target, draft_config, ranks, samples, files, heldout_files, steps, total)
    settings = draft_config.dspine_config
    if settings["alignment_warmup_steps"] is None:  # the draft that leaves the run says what was done
        draft_config.dspine_config = settings | {"alignment_warmup_steps": plan.warmup_steps}
    return plan


def features_in(key: str, path: str, target: TargetIdentity) -> list[str]:
    """The feature files of the recipe's ``key``, captured from ``target``.

    Raises:
        RecipeError: none there, or as ``check_features``.
    """
    files: list[str] = list_feature_files(path)
    if not files:
        raise RecipeError(f"{key}={path!r} holds no .ckpt files; specforge_dspine.capture writes them")
    try:
        check_features(Path(path), target)
    except FeatureFolderError as error:
        raise RecipeError(f"{key}: {error}") from error
    return files


def _check_device(recipe: Recipe) -> None:
    """Two defaults of SpecForge do not exist on a CPU; say so before anything is loaded."""
    if get_device_type() != "cpu":
        return
    training = recipe.host.training
    if training.fsdp_sharding != "NO_SHARD":
        raise RecipeError(f"training.fsdp_sharding={training.fsdp_sharding!r} needs an accelerator; use NO_SHARD")
    if training.attention_backend == "flex_attention":
        raise RecipeError("training.attention_backend='flex_attention' has no CPU backward; use sdpa")
