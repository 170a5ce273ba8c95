"""Variants of a recipe on the same data, seeds and budget, each trained and evaluated; and a report of it.

    python -m specforge_dspine.ablate --recipe recipes/smollm2_cpu_ablation.yaml --out runs/ablation
        [--variants full no-refinement NAME:key=value,..] [--seeds 1 2 3] [--at-once 2]
        --sets captured=runs/ablation/data/heldout mt-bench .. [--max-new-tokens N] [--limit N]

Every variant (specforge_dspine/ablate/variants.py; all by default) trains with every seed, and drafts greedily on the
``--sets`` of specforge_dspine.evaluate, by the commands that a user would give, ``--at-once`` of them at a time:

    OUT/VARIANT/seedN/run          the run, with its exports      OUT/VARIANT/seedN/train.log
    OUT/VARIANT/seedN/evaluation   what evaluate wrote            OUT/VARIANT/seedN/evaluate.log
    OUT/inputs.json                what all of them depend on

The same command continues: what is finished is left, a training that was stopped goes on from its checkpoint, an
evaluation from its last answer. More variants and seeds may be added; anything else that differs is refused by name.
At the end ``specforge_dspine.ablate.report`` makes the report, which can be made again at any time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from specforge_dspine.ablate.runs import Place, Progress, check_apart, claim, inputs_of, perform
from specforge_dspine.ablate.variants import VARIANTS, Variant, parse_variants
from specforge_dspine.evaluation.benchmarks import SYNTAX
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.training.run_dir import exclusive
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions
from specforge_dspine.utils.stages import StageError, Stages, run_parallel


def ablate(options: argparse.Namespace) -> None:
    """Everything that the command line says.

    Raises:
        ValueError: a recipe, variant or set that cannot be used, or ``--out`` belongs to other inputs.
        StageError: a training, an evaluation or the report failed.
    """
    variants = parse_variants(options.variants)
    recipe = load_recipe(options.recipe)
    overridden = {each.name: load_recipe(options.recipe, each.overrides).resolved()["dspine"] for each in variants}
    check_apart(overridden)
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"--seeds {' '.join(map(str, options.seeds))}: a seed occurs twice")
    inputs = inputs_of(recipe, overridden, options)
    with exclusive(options.out):
        claim(options.out, inputs)
        compare(options, recipe, variants)


def compare(options: argparse.Namespace, recipe: Recipe, variants: Sequence[Variant]) -> None:
    """Train, evaluate and report, as far as that is not done.

    Raises:
        StageError: a training, an evaluation or the report failed.
    """
    # Seed by seed: an ablation that is stopped has compared all variants.
    chosen = [
        (each, Place(options.out, each.name, seed)) for seed, each in itertools.product(options.seeds, variants)
    ]
    progress = Progress([place for _, place in chosen], options.at_once)
    print(f"{progress.all - sum(progress.left.values())} of {progress.all} parts are done already", flush=True)
    with Stages() as stages:
        jobs = [partial(perform, stages, options, recipe, *each, progress) for each in chosen]
        run_parallel(stages, jobs, options.at_once)
        stages.run("specforge_dspine.ablate.report", "--ablation", options.out)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", type=Path, required=True, help="the recipe that the variants are of")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--sets", nargs="+", required=True, metavar="SET", help=SYNTAX)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (default 256)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of each set (default: all)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1 if torch.cuda.is_available() else 2,
        help="runs at a time (default: 2, on GPUs 1)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of each run (default: its share of the cores)")
    options = parser.parse_args(argv)
    if options.at_once < 1:
        parser.error(f"--at-once {options.at_once}: must be at least 1")
    try:
        with signals_as_exceptions():
            ablate(options)
    except (ValueError, OSError, StageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as received:
        print(f"stopped by {received}; the same command continues", file=sys.stderr)
        return 128 + received.signum
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
