"""Recipes: one YAML file of SpecForge's own sections beside ``dspine:``, ``stream:`` and ``heldout:``.

docs/recipes.md describes every key. ``data.hidden_states_path`` makes a run offline: ``data.prompts_path`` and
``stream:`` are then not used. Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from specforge.config import Config
from specforge.config.schema import ModelConfig
from yaml.constructor import ConstructorError

from specforge_dspine.modeling.settings import DSpineOptions, StrictModel
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import atomic_write, looked_in

ALGORITHM = "dspine"
SPECFORGE_SECTIONS = ("model", "data", "training", "tracking", "runtime", "run_id", "output_dir")
# Sections and keys that SpecForge accepts for every algorithm and DSpine ignores, with what to use instead.
NOT_READ: dict[str, dict[str, str | None]] = {
    "": {"deployment": "torchrun for the ranks, and stream for the servers", "profiling": None},
    "training": {
        "dspark_ce_loss_alpha": "dspine.ce_weight",
        "dspark_l1_loss_alpha": "dspine.ce_weight (ℓ1 gets 1 − ce_weight)",
        "eval_interval": "heldout.interval",
        "prompt_seed": "training.seed",
        "resume_from": "the command-line flag --resume",
        "tp_size": "stream.managed.tp_size (the target's)",
        **dict.fromkeys(("dspark_confidence_head_alpha", "lambda_base_start", "lambda_base_decay_ratio")),
        **dict.fromkeys(("loss_type", "dpace_alpha", "ttt_length", "lk_loss_type", "kl_scale", "kl_decay")),
        **dict.fromkeys(("num_depths", "down_sample_ratio", "down_sample_ratio_min", "norm_before_residual")),
        **dict.fromkeys(("compact_teacher", "compact_teacher_chunk_size", "role", "sp_ring_size", "sp_ulysses_size")),
    },
    "model": {
        "draft_num_hidden_layers": "dspine.num_hidden_layers",
        "draft_block_size": "dspine.block_size",
        "aux_hidden_state_layer_ids": "dspine.target_layer_ids",
        **dict.fromkeys(("vocab_mapping_path", "use_liger_kernel", "target_backend", "shard_target_output")),
        **dict.fromkeys(("load_target_embedding", "tokenizer_pad_token_id")),
        **{
            name: "stream.managed.extra_args, in the server's own spelling"
            for name in ModelConfig.model_fields
            if name.startswith("sglang_")
        },
    },
    "data": {
        "train_data_path": "data_prep, then data.prompts_path: drafts learn from the target's own responses",
        "eval_data_path": "specforge_dspine.capture, then heldout.hidden_states_path",
        "eval_hidden_states_path": "heldout.hidden_states_path",
        "chat_template": "data_prep.regenerate",
        **dict.fromkeys(("is_preformatted", "train_only_last_turn", "build_dataset_num_proc", "cache_key")),
    },
    "runtime": {"producer_concurrency": "runtime.producer_lease (samples per capture call)"},
}


class ManagedServerOptions(StrictModel):
    """``stream.managed``: a server that the run starts, checks, logs and ends."""

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
    """``stream``: running servers (``servers``) or one that the run starts (``managed``)."""

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
    """``heldout``: evaluate the training metrics on other samples at an interval; the best checkpoint is marked."""

    hidden_states_path: str = Field(min_length=1)  # a folder written by specforge_dspine.capture
    interval: int = Field(gt=0)  # optimizer steps between two evaluations; each may write a checkpoint


@dataclass(frozen=True)
class Recipe:
    """A checked recipe: SpecForge's config, our sections, and the keys that other commands read."""

    specforge_config: Config
    dspine: DSpineOptions
    stream: StreamOptions | None
    heldout: HeldoutOptions | None
    run_id: str
    run_dir: Path  # output_dir
    target_path: str  # model.target_model_path: a folder, or a name on the hub
    dtype: str  # model.torch_dtype
    mask_token_id: int | None
    max_length: int  # tokens
    data_path: Path  # data.hidden_states_path of an offline run, else data.prompts_path

    def resolved(self) -> dict[str, Any]:
        """Return the recipe with every default filled in; ``check_recipe`` reads it back as this recipe."""
        document = self.specforge_config.model_dump(mode="json", include=set(SPECFORGE_SECTIONS))
        for section in NOT_READ.keys() & document.keys():
            document[section] = {k: v for k, v in document[section].items() if k not in NOT_READ[section]}
        ours = {"dspine": self.dspine, "stream": self.stream, "heldout": self.heldout}
        return document | {name: given.model_dump(mode="json") for name, given in ours.items() if given is not None}

    def __str__(self) -> str:
        return yaml.safe_dump(self.resolved(), sort_keys=False)

    def save(self, path: Path) -> None:
        """Write the resolved recipe, atomically."""
        with atomic_write(path) as file:
            file.write(str(self).encode())


@contextlib.contextmanager
def as_recipe_error(where: str) -> Iterator[None]:
    """Turn a library's ValueError or OSError into a RecipeError that names the key ``where``."""
    try:
        yield
    except RecipeError:
        raise
    except (ValueError, OSError) as error:
        raise RecipeError(f"{where}: {_one_line(error)}") from error


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


class RecipeLoader(yaml.SafeLoader):
    """YAML without repeated keys, of which the last would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a ConstructorError names a repeated key and its line."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConstructorError(problem=f"the key {key.value!r} is repeated", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str, where: str) -> Any:
    """Read the YAML of ``where``; a RecipeError says what is wrong, and in which line."""
    try:
        return yaml.load(text, RecipeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise RecipeError(f"{where} is not YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not YAML: {_one_line(error)}") from error


def merged(base: Any, values: Any) -> Any:
    """Merge ``values`` over ``base``, section by section at every depth."""
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    return base | {name: merged(base.get(name), value) for name, value in values.items()}


def read_document(path: Path, *, base_of: Path | None = None) -> dict[str, Any]:
    """Read a recipe, merged into its ``base``, unchecked. ``base_of``: the recipe that names this one as its base."""
    try:
        document = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror}{looked_in(path)}; recipes/ holds some") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not YAML: {_one_line(error)}") from error
    if not isinstance(document, dict):
        raise RecipeError(f"{path} must be a mapping of sections, found {type(document).__name__}")
    if "base" not in document:
        return document
    name = document.pop("base")
    if base_of is not None:
        raise RecipeError(f"base={path.name!r} of {base_of} has a base itself, {name!r}; give {name!r} as the base")
    document = merged(read_document(path.parent / str(name), base_of=path), document)
    assert isinstance(document, dict)
    return document


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` in place; the value is read as YAML. Unknown keys are caught by ``check_recipe``."""
    dotted, separator, value = override.partition("=")
    *sections, key = names = dotted.split(".")
    if not separator or not all(names):
        raise RecipeError(f"override {override!r} is not of the form section.key=value")
    parsed = read_yaml(value, f"override {override!r}: {value!r}")
    node = document
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise RecipeError(f"override {override!r}: {section} is a value, not a section")
    node[key] = parsed


def check_recipe(document: dict[str, Any], *, world_size: int = 1) -> Recipe:
    """Validate a recipe document for ``world_size`` trainer processes."""
    sections: dict[str, Any] = {name: Config.model_fields[name].annotation for name in SPECFORGE_SECTIONS}
    sections |= {"dspine": DSpineOptions, "stream": StreamOptions, "heldout": HeldoutOptions}
    refuse_unread(document, sections, "")
    document = with_home(document)
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
    heldout = _validated(HeldoutOptions, document["heldout"], "heldout") if document.get("heldout") else None
    config = _validated(Config, _specforge_document(document, streamed, world_size), "")
    if config.training.strategy != ALGORITHM:
        raise RecipeError(f"training.strategy={config.training.strategy!r}: this trainer runs {ALGORITHM!r}")
    check_ranges(config)
    return Recipe(
        specforge_config=config,
        dspine=options,
        stream=stream,
        heldout=heldout,
        run_id=config.run_id,
        run_dir=Path(config.output_dir),
        target_path=config.model.target_model_path,
        dtype=config.model.torch_dtype,
        mask_token_id=config.model.mask_token_id,
        max_length=config.data.max_length,
        data_path=Path(config.data.hidden_states_path or config.data.prompts_path),
    )


def with_home(value: Any) -> Any:
    """Expand a leading ``~/`` of every text, at every depth, as a shell does."""
    if isinstance(value, dict):
        return {key: with_home(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def check_ranges(config: Config) -> None:
    """Refuse values that SpecForge accepts and no run of ours can use."""
    training, run_id = config.training, config.run_id
    gamma, limit = training.loss_decay_gamma, config.data.max_prompts
    rules = (
        (
            "run_id",
            run_id,
            run_id == Path(run_id).name != "",
            "checkpoints are named by it; give a name without slashes",
        ),
        ("training.seed", training.seed, training.seed >= 0, "at least 0"),
        ("training.learning_rate", training.learning_rate, isfinite(training.learning_rate), "a finite number"),
        (
            "training.warmup_ratio",
            training.warmup_ratio,
            training.warmup_ratio < 1,
            "below 1; steps follow the warm-up",
        ),
        ("training.loss_decay_gamma", gamma, gamma is None or 0 < gamma < inf, "above 0, or null for no decay"),
        ("data.max_prompts", limit, limit is None or limit > 0, "at least 1, or null for all"),
    )
    for key, value, is_usable, usable in rules:
        if not is_usable:
            raise RecipeError(f"{key}={value!r}: {usable}")


Section = TypeVar("Section", bound=BaseModel)


def _validated(model: type[Section], value: Any, path: str) -> Section:
    """Validate ``value`` as ``model``; each problem is named by its path in the recipe, below ``path``."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise RecipeError("\n".join(_describe_problem(problem, path) for problem in error.errors())) from error


def _specforge_document(document: dict[str, Any], streamed: bool, world_size: int) -> dict[str, Any]:
    """Return SpecForge's part. A streamed run is its disaggregated consumer, whose validators demand a backend and a
    folder that we do not use: our store is a folder of the run."""
    ours = {key: document[key] for key in SPECFORGE_SECTIONS if key in document}
    ours["training"] = training = {"strategy": ALGORITHM} | (ours.get("training") or {})
    if not streamed:
        ours["data"] = {key: value for key, value in ours["data"].items() if key != "prompts_path"}
        return ours
    training["role"] = "consumer"
    ours["deployment"] = {
        "mode": "disaggregated",
        "trainer": {"nproc_per_node": world_size},
        "disaggregated": {"backend": "mooncake", "control_dir": f"{document.get('output_dir')}/stream"},
    }
    return ours


def refuse_unread(value: Any, schema: Any, path: str) -> None:
    """Refuse keys of ``value`` that ``schema`` (a mapping of names or a pydantic model) lacks or DSpine ignores."""
    fields = schema if isinstance(schema, dict) else {n: f.annotation for n, f in schema.model_fields.items()}
    if value is not None and not isinstance(value, Mapping):
        raise RecipeError(f"{path}: a section is expected, found {value!r}")
    ignored = NOT_READ.get(path, {})
    for key, inner in (value or {}).items():
        dotted = f"{path}.{key}" if path else str(key)
        if key in ignored:
            instead = f"use {ignored[key]}" if ignored[key] else "remove it"
            raise RecipeError(f"{dotted}: DSpine does not read it; {instead}")
        if key not in fields:
            known = sorted(fields.keys() - ignored.keys())
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            raise RecipeError(f"{dotted}: unknown key; {hint}")
        for annotation in (fields[key], *get_args(fields[key])):  # Model, or Model | None
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                refuse_unread(inner, annotation, dotted)


def _describe_problem(problem: Any, path: str) -> str:
    """Describe one of pydantic's problems in a line: key, value, and what is wrong with it."""
    where = ".".join([path] * bool(path) + [str(part) for part in problem["loc"]])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{where}: required, and not given"
    if isinstance(problem["input"], Mapping):  # a rule between several keys: its message names them
        return f"{where}: {message}" if where else message
    return f"{where}={problem['input']!r}: {message}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
