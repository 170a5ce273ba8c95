"""The plan of a run: what the trainer, the stream and the logs need of a resolved recipe; and the plan as text.

samples × epochs → steps · samples_per_step,  samples_per_step = ranks · batch_size · accumulation_steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge.algorithms.registry import AlgorithmRegistration
from specforge.config import Config
from specforge.utils import get_device_type

from specforge_dspine.modeling.draft_model import meta_draft
from specforge_dspine.modeling.settings import DSpineOptions
from specforge_dspine.streaming.feature_folder import feature_name
from specforge_dspine.streaming.record import Sample, TargetIdentity
from specforge_dspine.training.recipe import StreamOptions


@dataclass(frozen=True)
class RunSchedule:
    """Optimizer steps of a run, and the samples that they take."""

    ranks: int
    batch_size: int  # samples of a micro-batch on one rank
    accumulation_steps: int  # micro-batches of an optimizer step on one rank
    num_epochs: int
    samples: int  # of one epoch
    steps: int  # optimizer steps of this run
    total_steps: int  # horizon of the schedules, ≥ steps
    warmup_steps: int  # of the learning rate, as SpecForge counts them

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.ranks * self.batch_size * self.accumulation_steps

    @property
    def remainder(self) -> int:
        """Samples of the last epoch that fill no whole optimizer step, and are not trained on."""
        return self.samples * self.num_epochs % self.samples_per_step

    @property
    def beyond_max_steps(self) -> int:
        """Samples, in all epochs, after the last step of ``training.max_steps``."""
        return self.samples * self.num_epochs - self.remainder - self.steps * self.samples_per_step


@dataclass(frozen=True)
class TrainerOptions:
    """Arguments of SpecForge's trainer beside the schedule, under its own names; intervals in optimizer steps."""

    save_interval: int
    max_checkpoints: int
    eval_interval: int
    log_interval: int
    dataloader_num_workers: int


@dataclass(frozen=True)
class StreamPlan:
    """What streams the target's states: servers, samples, and the limits of SpecForge's producer by its own names."""

    options: StreamOptions
    samples: Sequence[Sample]
    limits: Mapping[str, int | None]

    @property
    def names(self) -> list[str]:
        """Names of the samples."""
        return [sample.name for sample in self.samples]

    def __str__(self) -> str:
        managed = self.options.managed
        if managed is None:
            return "streamed from " + ", ".join(self.options.servers)
        devices = ",".join(map(str, managed.devices)) or "cpu"
        return f"streamed from a server of this run (devices {devices}, tp {managed.tp_size})"


@dataclass(frozen=True)
class FeaturePlan:
    """A folder of captured features, and its files."""

    folder: str
    files: Sequence[str]

    @property
    def names(self) -> list[str]:
        """Names of the samples."""
        return [feature_name(file) for file in self.files]

    def __str__(self) -> str:
        return f"offline features in {self.folder}"


@dataclass(frozen=True)
class Plan:
    """A run that can start."""

    run_id: str
    run_dir: Path
    seed: int
    max_length: int  # tokens of a sample
    fsdp_sharding: str
    dist_timeout: int  # minutes of a collective
    specforge_config: Config  # for SpecForge's own builders
    algorithm: AlgorithmRegistration
    method: DSpineOptions
    target: TargetIdentity
    draft_config: Any
    schedule: RunSchedule
    trainer: TrainerOptions
    tracker: Mapping[str, Any] | None  # options of SpecForge's tracker; None: metrics.jsonl alone
    source: StreamPlan | FeaturePlan
    heldout: FeaturePlan | None

    @property
    def specforge_contract(self) -> dict[str, Any]:
        """What SpecForge's trainer compares on resume by itself, under its own names."""
        schedule = self.schedule
        contract = {
            "world_size": schedule.ranks,
            "batch_size": schedule.batch_size,
            "accumulation_steps": schedule.accumulation_steps,
            "effective_total_steps": schedule.total_steps,
        }  # for SpecForge a stream is one epoch
        return contract if isinstance(self.source, StreamPlan) else contract | {"num_epochs": schedule.num_epochs}

    def render(self) -> str:
        """Return the plan as text: topology, layers, sizes, parameter counts, schedule."""
        training, schedule, method, target = self.specforge_config.training, self.schedule, self.method, self.target
        draft = meta_draft(self.draft_config)
        total = sum(parameter.numel() for parameter in draft.parameters())
        codes = draft.config.vocab_size * method.transfer_rank * method.has_readouts
        lines = {
            "run": f"{self.run_id} in {self.run_dir}",
            "target": f"{target.model_path}: {target.num_layers} layers, H={target.hidden_size}, "
            f"V={target.vocab_size}, {target.dtype}",
            "taps": f"outputs of layers {', '.join(map(str, target.layers))} (0-based) and the final state",
            "features": str(self.source),
            "trainer": f"{schedule.ranks} rank(s) on {get_device_type()}, {self.fsdp_sharding}, "
            f"attention {training.attention_backend}",
            "draft": f"L={method.num_hidden_layers} B={method.block_size} r={method.transfer_rank} "
            f"a={method.message_size} K={method.top_k}, mask id {draft.mask_token_id}",
            "parameters": f"{total:,} trained, of which injection {draft.num_injection_parameters():,}; "
            f"code table {codes:,} fixed (float32)",
            "batch": f"{schedule.batch_size} sequences × {schedule.accumulation_steps} micro-batches × "
            f"{schedule.ranks} ranks = {schedule.samples_per_step} a step, ≤ {training.num_anchors} anchors each, "
            f"≤ {self.max_length} tokens",
            "data": f"{schedule.samples:,} samples × {schedule.num_epochs} epochs; "
            f"{schedule.remainder:,} fill no whole step, {schedule.beyond_max_steps:,} lie beyond max_steps",
            "schedule": f"{schedule.steps:,} steps of {schedule.total_steps:,}; lr {training.learning_rate:g}, "
            f"warm-up {schedule.warmup_steps} steps, then {training.lr_scheduler}; clip {training.max_grad_norm:g}",
            **self._method(),
        }
        if self.heldout is not None:
            lines["held out"] = f"{len(self.heldout.files):,} samples every {self.trainer.eval_interval} steps"
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())

    def _method(self) -> dict[str, str]:
        """What of the method is on, and its schedules over the steps."""
        method, total = self.method, self.schedule.total_steps
        parts = [name for name in ("injection", "refinement") if getattr(method, name)]
        blocks = "block-causal" if method.causal else "bidirectional blocks"
        text = ", ".join([blocks, *parts, f"α = {method.ce_weight:g}"])
        lines = {"method": f"{text}; {method.normalization} weights per {method.normalization_scope}"}
        lines |= {"curriculum": "off", "alignment": "off"}
        if method.curriculum:
            hold, end = int(method.replacement_hold_ratio * total), int(method.replacement_end_ratio * total)
            last = method.replacement_layers
            lines["curriculum"] = (
                f"p = {method.replacement_probability:g} until step {hold}, 0 from step {end}, "
                f"in {f'layers 1–{last}' if last > 1 else f'layer {last}'} of {method.num_hidden_layers}"
            )
        if method.alignment != "off":
            kind = {"cosine": "cosine", "ce": "token CE"}[method.alignment]
            warmup = self.draft_config.dspine_config["alignment_warmup_steps"]
            lines["alignment"] = (
                f"{kind}, β = {method.alignment_weight:g} after {warmup} steps, times the backbone's CE"
            )
        return lines
