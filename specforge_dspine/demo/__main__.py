"""The demo: a draft for a real small model, from prompts to a figure.

    python -m specforge_dspine.demo --recipe recipes/smollm2_cpu.yaml --out runs/demo [--prompts 250] [--heldout 64]

Every stage is a command that users run themselves, and is logged:

    demo.prepare          the target, prompts, its responses, samples, and held-out features
    data_prep.inspect     a page that shows which tokens are trained on
    train                 the recipe: streamed from a server of its own, exported at the end
    evaluate              acceptance length on the held-out prompts: with refinement, without it, of an untrained
                          draft, and sampled at temperature 1
    report                these evaluations side by side

Responses that exist already are kept; training starts from the beginning.
"""

from __future__ import annotations

import shutil
import time
from functools import partial

from specforge_dspine.demo.prepare import HELDOUT, TRAIN, DataOptions, PrepareOptions, prepare_data, samples_path
from specforge_dspine.training.recipe import Recipe, load_recipe
from specforge_dspine.utils.cli import Command, run_command
from specforge_dspine.utils.files import write_json
from specforge_dspine.utils.stages import Stages

EVALUATIONS: dict[str, tuple[object, ...]] = {  # greedy ones replay the responses, the sampled one runs the target
    "refined": ("--verify-live", 2),
    "sampled": ("--temperature", 1, "--limit", 8),
    "unrefined": ("--variant", "unrefined"),
    "untrained": ("--variant", "untrained", "--limit", 16),  # it accepts nothing; more prompts would show no more
}


def demo(options: DataOptions) -> str:
    """Run all stages; returns how long each took."""
    started, out, recipe = time.monotonic(), options.out, load_recipe(options.recipe)
    with Stages() as stages:
        prepare_data(stages, recipe, PrepareOptions(**options.model_dump()))
        samples, target = samples_path(out, TRAIN), recipe.target_path
        stages.run(
            "data_prep.inspect",
            *("--input", samples, "--output", out / "samples.html", "--target", target, "--show", 2),
        )
        shutil.rmtree(recipe.run_dir, ignore_errors=True)
        stages.run("specforge_dspine.train", "--recipe", options.recipe, f"data.prompts_path={samples}")
        shutil.rmtree(out / "evaluation", ignore_errors=True)
        stages.run_parallel([partial(evaluate, stages, recipe, options, name) for name in EVALUATIONS])
        folders = [f"{name}={out / 'evaluation' / name}" for name in EVALUATIONS]
        stages.run("specforge_dspine.report", "--evaluations", *folders, "--run", recipe.run_dir, "--out", out)
    seconds = stages.seconds | {"all": round(time.monotonic() - started, 1)}
    write_json(out / "seconds.json", seconds)
    times = ", ".join(f"{name} {value:g}" for name, value in seconds.items())
    return f"\nseconds: {times}\nlook at {out}/report.png"


def evaluate(stages: Stages, recipe: Recipe, options: DataOptions, name: str) -> None:
    """Run one of ``EVALUATIONS`` of the exported draft."""
    stages.run(
        "specforge_dspine.evaluate",
        *("--draft", recipe.run_dir / "export" / "sglang", "--target", recipe.target_path),
        *("--sets", f"captured={options.out / HELDOUT}", "--max-new-tokens", options.new_tokens),
        *(*EVALUATIONS[name], "--out", options.out / "evaluation" / name),
        name=f"evaluate {name}",
        threads=1,  # two at a time, on two cores
    )


main = partial(
    run_command,
    Command(DataOptions, demo),
    module="specforge_dspine.demo",
    doc=__doc__,
    advice="the same command keeps the responses made so far",
)

if __name__ == "__main__":
    raise SystemExit(main())
