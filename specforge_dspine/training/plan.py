"""Resolution of a recipe against target, data and ranks: ``make_plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specforge.algorithms.registry import AlgorithmRegistration
from specforge.application import resolve_run
from specforge.config import Config
from specforge.modeling.target.target_utils import load_target_config
from specforge.runtime.data_plane.offline_reader import list_feature_files
from specforge.training.model_loading import resolve_draft_config
from specforge.training.schedule import validate_fixed_accumulation_plan
from specforge.utils import get_device_type

from specforge_dspine.streaming.feature_folder import FeatureFolderError, check_features
from specforge_dspine.streaming.record import TargetIdentity
from specforge_dspine.training.capture_source import read_samples
from specforge_dspine.training.plan_parts import FeaturePlan, Plan, RunSchedule, StreamPlan, TrainerOptions
from specforge_dspine.training.recipe import Recipe, as_recipe_error
from specforge_dspine.training.specforge_algorithm import dspine_registry
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import check_model_path, looked_in


def make_plan(recipe: Recipe, *, ranks: int) -> Plan:
    """Resolve ``recipe`` for ``ranks`` trainer processes.

    Raises:
        RecipeError: it cannot run as it is; the message says what would.
    """
    config = recipe.specforge_config
    training = config.training
    check_environment(recipe, ranks)
    algorithm, target, draft_config = resolve_models(recipe)
    source = plan_stream(recipe) if recipe.stream else find_features("data", config.data.hidden_states_path, target)
    heldout = None
    if recipe.heldout is not None:
        heldout = find_features("heldout", recipe.heldout.hidden_states_path, target)
        if shared := set(source.names) & set(heldout.names):
            raise RecipeError(
                f"heldout.hidden_states_path={heldout.folder!r} holds {len(shared)} of the training samples, "
                f"{min(shared)} among them; capture others"
            )
    schedule = make_schedule(config, ranks, len(source.names))
    workers = config.data.dataloader_num_workers
    if workers is None:
        workers = algorithm.providers.model.default_dataloader_num_workers
    settings = draft_config.dspine_config
    if settings["alignment_warmup_steps"] is None:  # the exported draft records what was done
        draft_config.dspine_config = settings | {"alignment_warmup_steps": schedule.warmup_steps}
    return Plan(
        run_id=recipe.run_id,
        run_dir=recipe.run_dir,
        seed=training.seed,
        max_length=recipe.max_length,
        fsdp_sharding=training.fsdp_sharding,
        dist_timeout=training.dist_timeout,
        specforge_config=config,
        algorithm=algorithm,
        method=recipe.dspine,
        target=target,
        draft_config=draft_config,
        schedule=schedule,
        trainer=TrainerOptions(
            save_interval=training.save_interval,
            max_checkpoints=training.max_checkpoints,
            eval_interval=recipe.heldout.interval if recipe.heldout is not None else 0,
            log_interval=training.log_interval,
            dataloader_num_workers=workers,
        ),
        tracker=tracker_options(config),
        source=source,
        heldout=heldout,
    )


def check_environment(recipe: Recipe, ranks: int) -> None:
    """Check what needs no model and no data."""
    training, data = recipe.specforge_config.training, recipe.specforge_config.data
    if get_device_type() == "cpu" and training.fsdp_sharding != "NO_SHARD":
        raise RecipeError(f"training.fsdp_sharding={training.fsdp_sharding!r} needs an accelerator; use NO_SHARD")
    if get_device_type() == "cpu" and training.attention_backend == "flex_attention":
        raise RecipeError("training.attention_backend='flex_attention' has no CPU backward; use sdpa")
    if recipe.stream is None and data.max_prompts is not None:
        raise RecipeError(f"data.max_prompts={data.max_prompts}: not read with data.hidden_states_path; remove it")
    managed = recipe.stream.managed if recipe.stream is not None else None
    if managed is not None and ranks > 1 and managed.startup_timeout_s >= 60 * training.dist_timeout:
        raise RecipeError(
            f"training.dist_timeout={training.dist_timeout} minutes: the other ranks would give up while the server "
            f"starts (stream.managed.startup_timeout_s={managed.startup_timeout_s:g}); make it longer than that"
        )


def resolve_models(recipe: Recipe) -> tuple[AlgorithmRegistration, TargetIdentity, Any]:
    """Return the algorithm, the target and the draft's config."""
    config, target_path = recipe.specforge_config, recipe.target_path
    for name in ("target_model_path", "draft_checkpoint_path", "draft_model_config"):
        if (path := getattr(config.model, name)) is None:
            continue
        with as_recipe_error(f"model.{name}={path!r}"):
            check_model_path(path)
    with as_recipe_error("training"):
        algorithm = resolve_run(config, dspine_registry(recipe.dspine)).algorithm
    with as_recipe_error(f"model.target_model_path={target_path!r}{looked_in(target_path)}"):
        load_target_config(
            target_path, cache_dir=config.model.cache_dir, trust_remote_code=config.model.trust_remote_code
        )
    with as_recipe_error("dspine.target_layer_ids"):
        target = TargetIdentity.from_config(target_path, recipe.dspine.target_layer_ids, recipe.dtype)
    with as_recipe_error("the draft's configuration"):
        draft_config = resolve_draft_config(config, provider=algorithm.providers.model.draft_config)
    for name in ("hidden_size", "vocab_size"):
        if getattr(draft_config, name) != getattr(target, name):
            raise RecipeError(
                f"the draft to start from has {name}={getattr(draft_config, name)}, the target "
                f"{getattr(target, name)}: it was trained for another target"
            )
    return algorithm, target, draft_config


def plan_stream(recipe: Recipe) -> StreamPlan:
    """Read the samples to stream."""
    data, limits = recipe.specforge_config.data, recipe.specforge_config.runtime.model_dump()
    with as_recipe_error(f"data.prompts_path={data.prompts_path!r}"):
        samples = read_samples(data.prompts_path, max_length=data.max_length, max_prompts=data.max_prompts)
    limits["lease"] = limits.pop("producer_lease")
    assert recipe.stream is not None
    return StreamPlan(recipe.stream, samples, limits)


def find_features(section: str, folder: str, target: TargetIdentity) -> FeaturePlan:
    """Find the feature files of ``hidden_states_path`` in a section of the recipe, captured from ``target``."""
    files: list[str] = list_feature_files(folder)
    if not files:
        raise RecipeError(
            f"{section}.hidden_states_path={folder!r} holds no .ckpt files{looked_in(folder)}; "
            "specforge_dspine.capture writes them"
        )
    try:
        check_features(Path(folder), target)
    except FeatureFolderError as error:
        raise RecipeError(f"{section}.hidden_states_path: {error}") from error
    return FeaturePlan(folder, files)


def make_schedule(config: Config, ranks: int, samples: int) -> RunSchedule:
    """Count the optimizer steps of a run over ``samples`` samples an epoch."""
    training, streamed = config.training, not config.data.hidden_states_path
    batch, accumulation, epochs = training.batch_size, training.accumulation_steps, training.num_epochs
    quantum = ranks * batch * accumulation
    available = samples * epochs // quantum
    if not streamed:
        if left := samples % (ranks * batch):
            raise RecipeError(
                f"training.batch_size={batch} on {ranks} rank(s): of {samples} feature files {left} would fill no "
                "batch, and be dropped or repeated in every epoch; choose a batch_size that divides them, or take "
                "files away"
            )
        with as_recipe_error("training"):
            validate_fixed_accumulation_plan(
                num_samples=samples // ranks,
                batch_size=batch,
                accumulation_steps=accumulation,
                num_epochs=epochs,
                max_steps=training.max_steps,
            )
    steps = training.max_steps or available
    if available < 1:
        raise RecipeError(
            f"the data yields no optimizer step: {samples} samples × {epochs} epochs, and one step takes {quantum}; "
            "add data, or lower training.batch_size or accumulation_steps"
        )
    if steps > available:
        raise RecipeError(
            f"training.max_steps={steps} needs {steps * quantum} samples; data × epochs give {available} steps: "
            "raise training.num_epochs, or give at most that"
        )
    if streamed and (watermark := config.runtime.in_flight_low_watermark) < quantum:
        raise RecipeError(
            f"runtime.in_flight_low_watermark={watermark} is below one optimizer step of {quantum} samples; set "
            f"it to at least {quantum}, and the high watermark not below it"
        )
    total = training.total_steps or steps
    if total < steps:
        raise RecipeError(f"training.total_steps={total} is below the {steps} steps of this run")
    warmup = int(training.warmup_ratio * total)
    return RunSchedule(ranks, batch, accumulation, epochs, samples, steps, total, warmup)


def tracker_options(config: Config) -> dict[str, Any] | None:
    """Return the options of SpecForge's tracker, runs and projects named; None without a tracker."""
    if config.tracking.report_to == "none":
        return None
    runs = dict.fromkeys(("wandb_name", "swanlab_name", "mlflow_run_name"), config.run_id)
    projects = dict.fromkeys(("wandb_project", "swanlab_project", "mlflow_experiment_name"), "specforge-dspine")
    return config.tracking.model_dump() | runs | projects | config.tracking.model_dump(exclude_none=True)
