"""Recipes: one YAML file of SpecForge's own sections, beside ``dspine:``, ``stream:`` and ``heldout:``, ours.

    model: {target_model_path: .., torch_dtype: ..}      SpecForge's sections, as its docs describe them
    data: {prompts_path: .. , hidden_states_path: ..}
    training: {..}   tracking: {..}   runtime: {..}   run_id: ..   output_dir: ..
    dspine: {..}     the draft and the method (settings.DSpineOptions)
    stream: {..}     where the target's states come from (StreamOptions)
    heldout: {..}    captured samples that training never sees, and how often to look at them (HeldoutOptions)

    base: other.yaml  a recipe beside this one, of which this one only says what differs

``data.hidden_states_path`` alone turns a streamed recipe into an offline one: ``data.prompts_path`` and ``stream:``
are then not used.

Unknown keys anywhere are refused with the nearest known name, on the command line too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from specforge.config import Config
from specforge.config.schema import ModelConfig

from specforge_dspine.modeling.settings import DSpineOptions, StrictModel
from specforge_dspine.utils.errors import RecipeError

ALGORITHM = "dspine"
HOST_SECTIONS = ("model", "data", "training", "tracking", "runtime", "run_id", "output_dir")
# Sections of SpecForge's recipes that mean nothing here.
NO_SECTION = {
    "deployment": "not read here; torchrun gives the trainer's topology, and stream: the servers",
    "profiling": "not read here; remove it",
}
# SpecForge accepts these for every strategy; DSpine reads none of them, and a knob that does nothing misleads.
NOT_READ: dict[str, dict[str, str | None]] = {
    "training": {
        "dspark_ce_loss_alpha": "dspine.ce_weight",
        "dspark_l1_loss_alpha": "dspine.ce_weight (ℓ1 gets 1 − ce_weight)",
        "dspark_confidence_head_alpha": None,
        "lambda_base_start": None,
        "lambda_base_decay_ratio": None,
        "loss_type": None,
        "dpace_alpha": None,
        "ttt_length": None,
        "lk_loss_type": None,
        "kl_scale": None,
        "kl_decay": None,
        "num_depths": None,
        "down_sample_ratio": None,
        "down_sample_ratio_min": None,
        "norm_before_residual": None,
        "compact_teacher": None,
        "compact_teacher_chunk_size": None,
        "eval_interval": "heldout.interval",
        "prompt_seed": "training.seed",
        "resume_from": "the command-line flag --resume",
        "role": None,
        "sp_ring_size": None,
        "sp_ulysses_size": None,
        "tp_size": "stream.managed.tp_size (the target's)",
    },
    "model": {
        "draft_num_hidden_layers": "dspine.num_hidden_layers",
        "draft_block_size": "dspine.block_size",
        "aux_hidden_state_layer_ids": "dspine.target_layer_ids",
        "vocab_mapping_path": None,
        "use_liger_kernel": None,
        "target_backend": None,
        "shard_target_output": None,
        "load_target_embedding": None,
        "tokenizer_pad_token_id": None,
        **{
            name: "stream.managed.extra_args, in the server's own spelling"
            for name in ModelConfig.model_fields
            if name.startswith("sglang_")
        },
    },
    "data": {
        "train_data_path": "data_prep, then data.prompts_path: drafts learn from the target's own answers",
        "eval_data_path": "specforge_dspine.capture, then heldout.hidden_states_path",
        "eval_hidden_states_path": "heldout.hidden_states_path",
        "chat_template": "data_prep.regenerate",
        "is_preformatted": None,
        "train_only_last_turn": None,
        "build_dataset_num_proc": None,
        "cache_key": None,
    },
    "runtime": {"producer_concurrency": "runtime.producer_lease (samples per capture call)"},
}


class ManagedServerOptions(StrictModel):
    """``stream.managed``: a server that the run starts, health-checks, logs and ends."""

    devices: tuple[int, ...] = ()  # accelerator ordinals of the server; empty: the CPU engine
    tp_size: int = Field(default=1, gt=0)
    extra_args: tuple[str, ...] = ()  # further arguments of sglang.launch_server
    startup_timeout_s: float = Field(default=540.0, gt=0)  # below SpecForge's default dist_timeout

    @model_validator(mode="after")
    def _one_device_per_shard(self) -> ManagedServerOptions:
        if self.devices and len(self.devices) != self.tp_size:
            raise ValueError(f"devices={list(self.devices)} must name tp_size={self.tp_size} devices, or none (CPU)")
        return self


class StreamOptions(StrictModel):
    """``stream``: running servers (``servers``) or one of the run's own (``managed``)."""

    servers: tuple[str, ...] = ()
    managed: ManagedServerOptions | None = None
    capture_dir: str | None = None  # the servers' capture directory as this machine sees it; None: as they report
    max_dropped: int = Field(default=64, ge=0)  # bad records that are replaced before the run stops
    request_timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _servers_or_managed(self) -> StreamOptions:
        if bool(self.servers) == (self.managed is not None):
            raise ValueError(
                "give exactly one of servers (a list of URLs) and managed (a section, {} for its defaults)"
            )
        return self


class HeldoutOptions(StrictModel):
    """``heldout``: the training metrics on other samples, every so many optimizer steps; the best is marked."""

    hidden_states_path: str = Field(min_length=1)  # a folder written by specforge_dspine.capture
    interval: int = Field(gt=0)  # optimizer steps between two looks; each may write a checkpoint


@dataclass(frozen=True)
class Recipe:
    """A checked recipe: SpecForge's config and our sections."""

    host: Config
    dspine: DSpineOptions
    stream: StreamOptions | None
    heldout: HeldoutOptions | None = None

    @property
    def run_dir(self) -> Path:
        """``output_dir``."""
        return Path(self.host.output_dir)

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in; ``check_recipe`` reads it back as this recipe."""
        host = self.host.model_dump(mode="json", include=set(HOST_SECTIONS))
        for section, keys in NOT_READ.items():
            host[section] = {key: value for key, value in host[section].items() if key not in keys}
        ours = {"dspine": self.dspine, "stream": self.stream, "heldout": self.heldout}
        return host | {name: given.model_dump(mode="json") for name, given in ours.items() if given is not None}

    def save(self, path: Path) -> None:
        """Write the resolved recipe, atomically."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(yaml.safe_dump(self.resolved(), sort_keys=False), encoding="utf-8")
        os.replace(partial, path)


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = (), *, world_size: int = 1) -> Recipe:
    """Read, override (``section.key=value``) and check a recipe.

    Raises:
        RecipeError: no such file, not a mapping, an unknown key, a wrong value, or sections that contradict each
            other.
    """
    document = read_document(Path(path))
    for override in overrides:
        apply_override(document, override)
    return check_recipe(document, world_size=world_size)


def read_document(path: Path, *, of: Path | None = None) -> dict[str, Any]:
    """The recipe at ``path`` (the base ``of`` another) on top of its own ``base``, unchecked.

    Raises:
        RecipeError: no such file, not YAML, not a mapping, or a base that has a base.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror}; recipes/ holds some to start from") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {_one_line(error)}") from error
    if not isinstance(document, dict):
        raise RecipeError(f"{path} must be a mapping of sections, found {type(document).__name__}")
    if "base" not in document:
        return document
    name = document.pop("base")
    if of is not None:
        raise RecipeError(f"base={path.name!r} of {of} has a base itself, {name!r}; name that one, and what differs")
    base = read_document(path.parent / str(name), of=path)
    for section, values in document.items():
        both = isinstance(values, dict) and isinstance(base.get(section), dict)
        base[section] = base[section] | values if both else values
    return base


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` in place; the value is read as YAML. Unknown keys are caught by the check."""
    dotted, separator, value = override.partition("=")
    *sections, key = names = dotted.split(".")
    if not separator or not all(names):
        raise RecipeError(f"override {override!r} is not of the form section.key=value")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {value!r} is not YAML: {_one_line(error)}") from error
    node = document
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise RecipeError(f"override {override!r}: {section} is a value, not a section")
    node[key] = parsed


def check_recipe(document: dict[str, Any], *, world_size: int = 1) -> Recipe:
    """Validate a recipe document for ``world_size`` trainer processes.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    for section, why in NO_SECTION.items():
        if section in document:
            raise RecipeError(f"{section}: {why}")
    known = {name: Config.model_fields[name].annotation for name in HOST_SECTIONS}
    refuse_unknown(
        document, {**known, "dspine": DSpineOptions, "stream": StreamOptions, "heldout": HeldoutOptions}, ""
    )
    for section, keys in NOT_READ.items():
        for key, instead in keys.items():
            if key in (document.get(section) or {}):
                hint = f"; use {instead}" if instead else "; remove it"
                raise RecipeError(f"{section}.{key}: DSpine does not read it{hint}")
    if document.get("dspine") is None:
        raise RecipeError("dspine: the section is missing; it holds the draft's shape and the method's options")
    data = document.get("data") or {}
    streamed = not data.get("hidden_states_path")
    if streamed and not data.get("prompts_path"):
        raise RecipeError(
            "data: give prompts_path (samples whose states are streamed from a server) or hidden_states_path "
            "(a folder written by specforge_dspine.capture)"
        )
    if streamed and not document.get("stream"):
        raise RecipeError("stream: the section is missing; name servers, or managed, or set data.hidden_states_path")
    options = _validated(DSpineOptions, document["dspine"], "dspine")
    stream = _validated(StreamOptions, document["stream"], "stream") if streamed else None
    heldout = document.get("heldout") or None
    heldout = _validated(HeldoutOptions, heldout, "heldout") if heldout is not None else None
    host = _validated(Config, _host_document(document, streamed, world_size), "")
    if host.training.strategy != ALGORITHM:
        raise RecipeError(f"training.strategy={host.training.strategy!r}: this trainer runs {ALGORITHM!r}")
    if Path(host.run_id).name != host.run_id:
        raise RecipeError(f"run_id={host.run_id!r}: checkpoints are named by it; give a name without slashes")
    return Recipe(host=host, dspine=options, stream=stream, heldout=heldout)


Section = TypeVar("Section", bound=BaseModel)


def _validated(model: type[Section], value: Any, path: str) -> Section:
    """``value`` as ``model``; every problem is named by its path in the recipe, ``path`` being the section's."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise RecipeError("\n".join(_readable(problem, path) for problem in error.errors())) from error


def _host_document(document: dict[str, Any], streamed: bool, world_size: int) -> dict[str, Any]:
    """SpecForge's part. Streaming is its disaggregated consumer: its validators want a backend by name, although
    our store is a directory of the run (see host.py)."""
    host = {key: document[key] for key in HOST_SECTIONS if key in document}
    training = dict(host.get("training") or {})
    training.setdefault("strategy", ALGORITHM)
    host["training"] = training
    if not streamed:
        host["data"] = {key: value for key, value in host["data"].items() if key != "prompts_path"}
    if streamed:
        training["role"] = "consumer"
        host["deployment"] = {
            "mode": "disaggregated",
            "trainer": {"nproc_per_node": world_size},
            "disaggregated": {
                "backend": "mooncake",
                "control_dir": f"{document.get('output_dir')}/stream",  # never read: assembly.stream_paths
            },
        }
    return host


def refuse_unknown(value: Any, schema: Any, path: str) -> None:
    """Walk ``value`` along ``schema`` (a mapping of names or a pydantic model) and refuse unknown keys.

    Raises:
        RecipeError: with the key's full path and the nearest known name.
    """
    fields = schema if isinstance(schema, dict) else {n: f.annotation for n, f in schema.model_fields.items()}
    if not isinstance(value, Mapping):
        if value is not None:
            raise RecipeError(f"{path}: a section is expected, found {value!r}")
        return
    for key, inner in value.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key not in fields:
            useful = sorted(fields.keys() - NOT_READ.get(path, {}).keys())
            near = difflib.get_close_matches(str(key), useful, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(useful)}"
            raise RecipeError(f"{dotted}: unknown key; {hint}")
        section = _section(fields[key])
        if section is not None:
            refuse_unknown(inner, section, dotted)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field's annotation (``Model`` or ``Model | None``), if it is a section."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _readable(problem: Any, path: str) -> str:
    """One line for one problem that pydantic found: key, value, and what is wrong with it."""
    where = ".".join([path] * bool(path) + [str(part) for part in problem["loc"]])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{where}: required, and not given"
    if isinstance(problem["input"], Mapping):  # a rule between several keys: its message names them
        return f"{where}: {message}" if where else message
    return f"{where}={problem['input']!r}: {message}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
