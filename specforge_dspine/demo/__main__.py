"""The main job on a real small model, from prompts to a picture.

    python -m specforge_dspine.demo --recipe recipes/smollm2_cpu.yaml --out runs/demo [--prompts 250] [--heldout 64]

Each stage is one or several of the commands that a user runs, printed as they are run:

    preparation           target, prompts, the target's answers, samples, the held-out answers' states (see there)
    data_prep.inspect     a page that shows what is trained on
    train                 the recipe: streamed from a server of its own, exported at the end
    evaluate              acceptance length on the held-out prompts: with refinement, without it, of an untrained
                          draft, and sampled at temperature 1
    report                these side by side

Answers already made are kept; training starts anew.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from specforge_dspine.demo.prepare import HELDOUT, TRAIN, Amounts, prepare, samples_of
from specforge_dspine.streaming.server import ManagedServerError
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.utils.errors import RecipeError
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions
from specforge_dspine.utils.stages import StageError, Stages, run_parallel

EVALUATIONS: dict[str, tuple[object, ...]] = {  # greedy ones replay the answers, the sampled one asks the target
    "refined": ("--live", 2),
    "sampled": ("--temperature", 1, "--limit", 8),
    "unrefined": ("--variant", "unrefined"),
    "untrained": ("--variant", "untrained", "--limit", 16),  # it gets nothing right, and it takes no more to see
}


def demo(stages: Stages, recipe_path: Path, recipe: Recipe, out: Path, amounts: Amounts) -> None:
    """All stages; everything goes below ``out`` and the recipe's own paths.

    Raises:
        StageError: a stage failed.
        ManagedServerError: a server for the answers did not start.
    """
    prepare(stages, recipe, out, amounts)
    samples, target = samples_of(out, TRAIN), recipe.target_path
    stages.run(
        "data_prep.inspect",
        *("--input", samples, "--output", out / "samples.html", "--target", target, "--show", 2),
    )
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    stages.run("specforge_dspine.train", "--recipe", recipe_path, f"data.prompts_path={samples}")
    shutil.rmtree(out / "evaluation", ignore_errors=True)
    run_parallel(stages, [partial(evaluate, stages, recipe, out, amounts.new_tokens, name) for name in EVALUATIONS])
    folders = [f"{name}={out / 'evaluation' / name}" for name in EVALUATIONS]
    stages.run("specforge_dspine.report", "--evaluations", *folders, "--run", recipe.run_dir, "--out", out)


def evaluate(stages: Stages, recipe: Recipe, out: Path, new_tokens: int, name: str) -> None:
    """One of ``EVALUATIONS`` of the exported draft."""
    stages.run(
        "specforge_dspine.evaluate",
        *("--draft", recipe.run_dir / "export" / "sglang", "--target", recipe.target_path),
        *("--sets", f"captured={out / HELDOUT}", "--max-new-tokens", new_tokens, *EVALUATIONS[name]),
        *("--out", out / "evaluation" / name),
        name=f"evaluate {name}",
        threads=1,  # two at a time, on two cores
    )


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
        with signals_as_exceptions(), Stages() as stages:
            amounts = Amounts(train=args.prompts, heldout=args.heldout, new_tokens=args.new_tokens)
            demo(stages, args.recipe, recipe, args.out, amounts)
        seconds = stages.seconds | {"all": round(time.monotonic() - started, 1)}
        write_json(args.out / "seconds.json", seconds)
        print("\nseconds: " + ", ".join(f"{name} {value:g}" for name, value in seconds.items()))
        print(f"look at {args.out}/report.png")
    except (RecipeError, StageError, ManagedServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signal_received:
        print(f"stopped by {signal_received}; the same command keeps the answers made so far", file=sys.stderr)
        return 128 + signal_received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
