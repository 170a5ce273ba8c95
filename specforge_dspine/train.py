"""Train a DSpine draft from a recipe.

    python -m specforge_dspine.train --recipe recipes/smollm2_cpu.yaml [--plan] [--resume] [section.key=value ..]
    torchrun --nproc_per_node 7 -m specforge_dspine.train --recipe recipes/qwen3_8b.yaml

Recipe → plan → stream → trainer → checkpoints → export. Rank 0 owns the capture server (``stream.managed``) and
the producer; every rank trains. A directory that holds a run is continued only with ``--resume``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from specforge.distributed import destroy_distributed, init_distributed

from specforge_dspine.export import export_run
from specforge_dspine.formats.config_json import LAYOUTS, refuse_unservable
from specforge_dspine.streaming.client import CaptureVerificationError, SGLangClient
from specforge_dspine.streaming.server import ManagedServer, ManagedServerError
from specforge_dspine.training import trainers as assembly
from specforge_dspine.training.capture_source import CaptureSource, PromptPlan, resume_delivery
from specforge_dspine.training.distributed import on_every_rank, own_environment
from specforge_dspine.training.plan import Plan, make_plan
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.training.resume_contract import host_contract, refuse_changes
from specforge_dspine.training.run_checkpoints import checkpoint_step
from specforge_dspine.training.run_dir import DELIVERY_LOG, accept, claim_run_dir, exclusive, restore_best
from specforge_dspine.training.run_logger import RunLogger
from specforge_dspine.training.specforge_internals import bootstrap_single_process_env, build_model_bundle
from specforge_dspine.utils.errors import CheckpointError, RecipeError, RunError
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions

PROBE_TOKENS = 32  # at most, of a real sample, for the proof of the stream


@contextlib.contextmanager
def refused_resume(resume_from: str | None) -> Iterator[None]:
    """SpecForge refuses a checkpoint of another run with a ValueError: a fault of the recipe, not of the code."""
    try:
        yield
    except ValueError as error:
        if resume_from is None:
            raise
        raise RecipeError(str(error)) from error


def run_offline(plan: Plan, bundle: Any, logger: RunLogger, rank: int, resume_from: str | None) -> int:
    """Train from feature files; returns the optimizer steps taken.

    Raises:
        RecipeError: the checkpoint belongs to another run.
    """
    with refused_resume(resume_from):
        trainer = assembly.offline_trainer(plan, bundle, logger, rank=rank, resume_from=resume_from)
    on_every_rank(rank, lambda: accept(plan.recipe, plan.draft_config.to_dict(), resume_from))
    return int(trainer.fit())


def run_streamed(plan: Plan, bundle: Any, logger: RunLogger, rank: int, resume_from: str | None) -> int:
    """Train from a live server; returns the optimizer steps taken.

    Raises:
        RecipeError: the checkpoint belongs to another run.
        RunError: the stream ended before the run did.
        CaptureVerificationError, ManagedServerError, ConnectionError: as ``connect_servers``.
    """
    run_dir = plan.recipe.run_dir
    start_step = checkpoint_step(resume_from)
    paths = assembly.stream_paths(run_dir)
    with contextlib.ExitStack() as stack:
        streaming: list[tuple[assembly.Producer, CaptureSource]] = []  # rank 0 alone has one

        def connect() -> None:
            shutil.rmtree(paths["base"], ignore_errors=True)  # leftovers of a killed run
            paths["base"].mkdir(parents=True)
            stack.callback(shutil.rmtree, paths["base"], ignore_errors=True)
            clients = connect_servers(plan, bundle.model.lm_head.weight, stack)
            source = capture_source(plan, clients, consumed=start_step * plan.quantum)
            slots = range(start_step * plan.quantum, plan.steps * plan.quantum)
            streaming.append((assembly.Producer(plan, source, paths["channel"], slots), source))

        on_every_rank(rank, connect)
        with refused_resume(resume_from):
            trainer = assembly.streamed_trainer(
                plan, bundle, logger, rank=rank, paths=paths, resume_from=resume_from, start_step=start_step
            )
        on_every_rank(rank, lambda: accept(plan.recipe, plan.draft_config.to_dict(), resume_from))
        if not streaming:
            return int(trainer.fit())
        producer, source = streaming[0]
        stack.callback(producer.stop)
        producer.start()
        try:
            return int(trainer.fit())
        except Exception as error:
            if producer.error is not None:
                raise RunError(f"the stream ended: {producer.error}") from error
            raise
        finally:
            report = source.report() | {"remainder": plan.remainder, "beyond_max_steps": plan.not_reached}
            write_json(run_dir / "stream.json", report)
            if report["dropped"]:
                print(f"{len(report['dropped'])} records were dropped and replaced: see {run_dir}/stream.json")


def connect_servers(plan: Plan, head: torch.Tensor, stack: contextlib.ExitStack) -> list[SGLangClient]:
    """Start or find the servers and prove each stream before the first step.

    Raises:
        CaptureVerificationError, ConnectionError, ManagedServerError: what is wrong with a server, and what to do.
    """
    options, training = plan.recipe.stream, plan.recipe.host.training
    assert options is not None
    urls, capture_dir = list(options.servers), options.capture_dir
    if options.managed is not None:
        print(f"starting the capture server (log: {plan.recipe.run_dir}/server.log)", flush=True)
        server = ManagedServer(
            plan.target.model_path,
            plan.recipe.run_dir,
            plan.target.layers,
            dtype=plan.target.dtype,
            devices=options.managed.devices,
            tp_size=options.managed.tp_size,
            extra_args=options.managed.extra_args,
            startup_timeout_s=options.managed.startup_timeout_s,
        )
        stack.enter_context(server)
        urls = [server.url]
    clients = []
    probe = max(plan.samples[: training.batch_size * 8], key=lambda sample: len(sample.input_ids))
    for url in urls:
        client = SGLangClient(
            url,
            capture_dir=Path(capture_dir) if capture_dir else None,
            timeout_s=options.request_timeout_s,
        )
        stack.callback(client.close)
        facts = client.verify_server(plan.target, head, probe.input_ids[:PROBE_TOKENS])
        print(f"stream proven: {url}, plugin {facts.version}, records in {facts.capture_dir}", flush=True)
        clients.append(client)
    return clients


def capture_source(plan: Plan, clients: list[SGLangClient], *, consumed: int) -> CaptureSource:
    """The source of this run's samples, positioned after the ``consumed`` ones of the checkpoint."""
    host, options = plan.recipe.host, plan.recipe.stream
    assert options is not None
    log = plan.recipe.run_dir / DELIVERY_LOG
    return CaptureSource(
        clients,
        PromptPlan(plan.samples, host.training.seed),
        assembly.record_store(plan.recipe.run_dir),
        plan.target,
        run_id=host.run_id,
        max_dropped=options.max_dropped,
        log=log,
        state=resume_delivery(log, consumed),
    )


def run(recipe: Recipe, *, resume: bool) -> int:
    """Train and export; returns the optimizer steps taken. Under torchrun every rank calls it.

    Raises:
        RecipeError: the recipe cannot be run, or the directory not be used.
        RunError, FloatingPointError: the run cannot go on.
    """
    host = recipe.host
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_environment())
        os.environ["FSDP_SHARDING"] = host.training.fsdp_sharding  # else SpecForge's backend ignores the recipe
        set_seed(host.training.seed)
        bootstrap_single_process_env()
        init_distributed(timeout=host.training.dist_timeout)
        stack.callback(destroy_distributed)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        plan = make_plan(recipe, ranks=ranks)

        def claim() -> str | None:
            stack.enter_context(exclusive(recipe.run_dir))
            return claim_run_dir(recipe, resume=resume)

        resume_from = on_every_rank(rank, claim)
        if rank == 0:
            print(plan.render(), flush=True)
        bundle = build_model_bundle(host, algorithm=plan.algorithm)
        if resume_from is not None:
            contract = host_contract(host, ranks=ranks, total_steps=plan.total_steps)
            contract |= bundle.strategy_kwargs.resume_contract
            on_every_rank(rank, lambda: refuse_changes(resume_from, contract))
            on_every_rank(rank, lambda: restore_best(recipe, checkpoint_step(resume_from)))
        logger = RunLogger(host, rank=rank, steps=plan.steps, micro_batches=ranks * host.training.accumulation_steps)
        runner = run_offline if recipe.stream is None else run_streamed
        try:
            steps = runner(plan, bundle, logger, rank, resume_from)
        finally:
            logger.close()
        on_every_rank(rank, lambda: export_all(recipe))
        return steps


def export_all(recipe: Recipe) -> None:
    """The best checkpoint, or the newest, in every layout that can serve this variant, below the run's directory.

    Raises:
        CheckpointError: as ``export_run``.
    """
    for layout in LAYOUTS:
        try:
            refuse_unservable(layout, recipe.dspine)
        except CheckpointError as error:
            print(f"not exported as {layout}: {error}", flush=True)
            continue
        out = recipe.run_dir / "export" / layout
        checkpoint = export_run(recipe.run_dir, layout, out)
        print(f"exported: {out} (checkpoint: {checkpoint})", flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", required=True, help="YAML file, see recipes/")
    parser.add_argument("--plan", action="store_true", help="print the resolved run without starting it")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in output_dir from its newest complete checkpoint"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the recipe")
    args = parser.parse_intermixed_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        recipe = load_recipe(args.recipe, args.overrides, world_size=ranks)
        if args.plan:
            plan = make_plan(recipe, ranks=ranks)
            if int(os.environ.get("RANK", "0")) == 0:
                print(plan.render())
            return 0
        with signals_as_exceptions():
            run(recipe, resume=args.resume)
    except (RecipeError, CaptureVerificationError, ManagedServerError, FileNotFoundError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, FloatingPointError) as error:
        print(f"error: {error}; continue with --resume once it is mended", file=sys.stderr)
        return 1
    except Interrupted as signal_received:
        print(f"stopped by {signal_received}; continue with --resume", file=sys.stderr)
        return 128 + signal_received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
