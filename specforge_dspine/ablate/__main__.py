"""An ablation: variants of a recipe on the same data, seeds and budget, each trained and evaluated; and its report.

    python -m specforge_dspine.ablate --recipe recipes/smollm2_cpu_ablation.yaml --out runs/ablation
        [--variants full no-refinement NAME:key=value,..] [--seeds 1 2 3] [--max-parallel 2]
        --sets captured=runs/ablation/data/heldout mt-bench .. [--max-new-tokens N] [--limit N]

Every variant (specforge_dspine/ablate/variants.py; all by default) trains with every seed, and drafts greedily on the
``--sets`` of specforge_dspine.evaluate. The commands are those of a user, ``--max-parallel`` of them at a time:

    OUT/VARIANT/seedN/run          the run, with its exports      OUT/VARIANT/seedN/train.log
    OUT/VARIANT/seedN/evaluation   what evaluate wrote            OUT/VARIANT/seedN/evaluate.log
    OUT/inputs.json                what all of them depend on

The same command continues: finished parts are kept, a stopped training resumes from its checkpoint, and a stopped
evaluation after its last response. Variants and seeds may be added later; any other change is refused by name.
Finally ``specforge_dspine.ablate.report`` makes the report. It can be made again at any time.
"""

from __future__ import annotations

import itertools
from functools import partial

from specforge_dspine.ablate.runs import AblateOptions, Progress, VariantRun, train_and_evaluate
from specforge_dspine.ablate.variants import ablation_inputs, check_distinct, claim_folder, parse_variants
from specforge_dspine.evaluation.benchmarks import open_sets
from specforge_dspine.training.recipe import load_recipe
from specforge_dspine.training.run_dir import exclusive
from specforge_dspine.utils.cli import Command, run_command
from specforge_dspine.utils.stages import Stages


def ablate(options: AblateOptions) -> None:
    """Train, evaluate and report, as far as that is not done."""
    variants = parse_variants(options.variants)
    recipe = load_recipe(options.recipe)
    sections = {name: load_recipe(options.recipe, each).resolved()["dspine"] for name, each in variants.items()}
    check_distinct(sections)
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"--seeds {' '.join(map(str, options.seeds))}: a seed occurs twice")
    inputs = ablation_inputs(recipe, sections, open_sets(options.sets, options.limit), options.max_new_tokens)
    with exclusive(options.out):
        claim_folder(options.out, inputs)
        # Seed by seed: an ablation that is stopped has compared all variants.
        runs = [
            VariantRun(options.out, name, seed, overrides)
            for seed, (name, overrides) in itertools.product(options.seeds, variants.items())
        ]
        progress = Progress(runs, options.max_parallel)
        with Stages() as stages:
            jobs = [partial(train_and_evaluate, stages, options, recipe, run, progress) for run in runs]
            stages.run_parallel(jobs, options.max_parallel)
            stages.run("specforge_dspine.ablate.report", "--ablation", options.out)


main = partial(run_command, Command(AblateOptions, ablate), module="specforge_dspine.ablate", doc=__doc__)

if __name__ == "__main__":
    raise SystemExit(main())
