"""What can a trained draft do? Acceptance on held-out answers, as report.json and a picture.

    python -m specforge_dspine.report --draft DIR --target DIR --features DIR --out DIR [--run DIR] [--live N]

``--features`` is a folder that ``specforge_dspine.capture`` wrote from held-out samples: the target's greedy answers
and its states over them. Three drafts are compared on the same answers: the trained one with last-write refinement,
the same without it, and an untrained draft (on 16). ``--live N`` decodes N of the prompts for real and demands the
same tokens and rounds. τ, its intervals and every round's tokens go to report.json (fields: docs/metrics.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead
from specforge.runtime.data_plane.offline_reader import list_feature_files
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from specforge_dspine.acceptance import (
    Trace,
    acceptance_by_position,
    decode_live,
    frozen_draft,
    replay,
    tau,
    tau_interval,
)
from specforge_dspine.export import load_draft
from specforge_dspine.model import DSpineDraftModel
from specforge_dspine.plan import check_features
from specforge_dspine.stream.record import TargetIdentity, read_record
from specforge_dspine.training_model import DSpineTrainingModel
from specforge_dspine.transfer import build_transfer_space

Traces = dict[str, list[Trace]]

UNTRAINED_PROMPTS = 16  # that the untrained draft is tried on: it gets nothing right, and it takes no more to see


class LiveMismatch(RuntimeError):
    """Real decoding and its replay disagree: one of the two is wrong."""


def untrained_like(draft: DSpineDraftModel, head: Tensor, seed: int = 0) -> DSpineDraftModel:
    """A draft of the same configuration as training would start from."""
    torch.manual_seed(seed)
    fresh = DSpineDraftModel(draft.config).to(draft.fc.weight.dtype)
    fresh.set_transfer_space(build_transfer_space(head, draft.settings.transfer_rank))
    return fresh.eval()


def replay_all(models: dict[str, DSpineTrainingModel], files: Sequence[str]) -> Traces:
    """Traces by variant: "refined" and "unrefined" of the trained model, "untrained" (refined) of the fresh one, on
    the first ``UNTRAINED_PROMPTS`` alone."""
    traces: Traces = {"refined": [], "unrefined": [], "untrained": []}
    dtype = models["trained"].lm_head.weight.dtype
    for file in tqdm(files, desc="drafting", unit="prompt", disable=not sys.stderr.isatty()):
        record = read_record(Path(file))
        ids, taps = record["input_ids"], record["hidden_states"][0].to(dtype)
        prompt = int(record["loss_mask"].argmax())
        name = Path(file).name.removesuffix(".ckpt")
        trained = replay(models["trained"], name, ids, taps, prompt)
        for variant in ("refined", "unrefined"):
            traces[variant].append(trained[variant])
        if len(traces["untrained"]) < UNTRAINED_PROMPTS:
            traces["untrained"].append(replay(models["untrained"], name, ids, taps, prompt)["refined"])
    return traces


def check_live(model: DSpineTrainingModel, target_path: str, traces: Sequence[Trace], eos: set[int]) -> None:
    """Decode the prompts of ``traces`` with real verification and compare answer and rounds.

    Raises:
        LiveMismatch: the answer differs from the target's, or a round from its replay.
    """
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=model.lm_head.weight.dtype).eval()
    layers = model.draft_model.target_layer_ids
    for trace in tqdm(traces, desc="decoding", unit="prompt", disable=not sys.stderr.isatty()):
        prompt, answer = trace.ids[: trace.prompt], list(trace.ids[trace.prompt :])
        text, rounds = decode_live(model, target, layers, torch.tensor(prompt), len(answer), eos)
        if text != answer:
            raise LiveMismatch(f"{trace.name}: decoding gave {text}, the target's greedy answer is {answer}")
        if tuple(rounds) != trace.rounds:
            raise LiveMismatch(f"{trace.name}: rounds {rounds} differ from the replayed {trace.rounds}")


def summary(traces: Traces, proposals: int) -> dict[str, Any]:
    """τ, interval, rounds and acceptance by position of every variant, and the gain of the refinement."""
    variants = {
        name: {
            "tau": tau(each),
            "tau_interval_95": tau_interval(each),
            "rounds": sum(len(trace.rounds) for trace in each),
            "tokens": sum(trace.tokens for trace in each),
            "acceptance_by_position": acceptance_by_position(each, proposals),
        }
        for name, each in traces.items()
    }
    low, high = tau_interval(traces["refined"], traces["unrefined"])
    return {
        "prompts": len(traces["refined"]),
        "temperature": 0,
        "variants": variants,
        "refinement_gain": tau(traces["refined"]) - tau(traces["unrefined"]),
        "refinement_gain_interval_95": [low, high],
        "interval": "bootstrap over prompts, 10000 resamples",
    }


def draw(path: Path, report: dict[str, Any], metrics: Sequence[dict[str, float]]) -> None:
    """The picture: loss parts, coverage and accuracies over training, acceptance by position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    steps = [line["step"] for line in metrics]
    aligned = [name for name in metrics[0] if name.startswith("align_")] if metrics else []
    panels = (
        (axes[0, 0], "loss parts", ["ce", "refined_ce", "l1", "refined_l1"]),
        (axes[0, 1], "coverage and accuracy", ["coverage", "candidate_mass", "accuracy", "refined_accuracy"]),
        (axes[1, 0], "layer alignment and its gate", [*aligned, "lambda"]),
    )
    for axis, title, names in panels:
        for name in names:
            axis.plot(steps, [line.get(name) for line in metrics], label=name)
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
        if steps:
            axis.legend()
    axis = axes[1, 1]
    for name, entry in report["variants"].items():
        shares = entry["acceptance_by_position"]
        axis.plot(range(1, len(shares) + 1), shares, "o-", label=f"{name}: τ = {entry['tau']:.3f}")
    axis.set(title="share of rounds accepted up to position", xlabel="position in the block", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend()
    low, high = report["refinement_gain_interval_95"]
    figure.suptitle(
        f"{report['prompts']} held-out prompts, greedy; refinement adds {report['refinement_gain']:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] to τ"
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.png")
    figure.savefig(partial, dpi=110)
    os.replace(partial, path)
    pyplot.close(figure)


def end_tokens(target: str) -> set[int]:
    """Ids that end an answer: the generation config's, or the tokenizer's end token."""
    path = Path(target) / "generation_config.json"
    listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    if listed is None:
        listed = AutoTokenizer.from_pretrained(target).eos_token_id
    return set(listed) if isinstance(listed, list) else {int(listed)}


def make_report(
    draft_path: Path, target: str, features: Path, out: Path, run: Path | None, live: int
) -> dict[str, Any]:
    """Compare the drafts on ``features`` and write report.json and report.png into ``out``.

    Raises:
        FileNotFoundError: no feature files.
        RecipeError: they were captured from another target, other layers or in another dtype.
        LiveMismatch: as ``check_live``.
    """
    files = list_feature_files(str(features))
    if not files:
        raise FileNotFoundError(
            f"{features} holds no .ckpt files; write them with python -m specforge_dspine.capture"
        )
    draft = load_draft(draft_path)
    dtype = str(draft.fc.weight.dtype).removeprefix("torch.")
    check_features(features, TargetIdentity.from_config(target, draft.target_layer_ids, dtype))
    tables = TargetEmbeddingsAndHead.from_pretrained(target, device="cpu", dtype=draft.fc.weight.dtype)
    head, embedding = tables.lm_head.weight, tables.embed_tokens.weight
    models = {
        "trained": frozen_draft(draft, head, embedding),
        "untrained": frozen_draft(untrained_like(draft, head), head, embedding),
    }
    traces = replay_all(models, files)
    check_live(models["trained"], target, traces["refined"][:live], end_tokens(target))
    report = summary(traces, int(draft.block_size) - 1)
    report |= {"draft": str(draft_path), "target": target, "decoded_live": live}
    metrics: list[dict[str, float]] = []
    if run is not None:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = [values for values in map(json.loads, lines) if "loss" in values]  # others: held-out samples
    out.mkdir(parents=True, exist_ok=True)
    document = report | {"traces": {name: [t.to_json() for t in each] for name, each in traces.items()}}
    partial = out / f".report.{os.getpid()}"
    partial.write_text(json.dumps(document), encoding="utf-8")
    os.replace(partial, out / "report.json")
    draw(out / "report.png", report, metrics)
    return report


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draft", type=Path, required=True, help="exported draft, either flavour")
    parser.add_argument("--target", required=True, help="the target's folder")
    parser.add_argument("--features", type=Path, required=True, help="captured held-out answers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="training run whose curves to draw")
    parser.add_argument("--live", type=int, default=2, help="prompts to decode for real (default 2)")
    args = parser.parse_args(argv)
    try:
        report = make_report(args.draft, args.target, args.features, args.out, args.run, args.live)
    except (ValueError, FileNotFoundError, LiveMismatch) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, entry in report["variants"].items():
        low, high = entry["tau_interval_95"]
        print(f"τ {name:<10} {entry['tau']:.3f}  [{low:.3f}, {high:.3f}]  {entry['rounds']} rounds")
    low, high = report["refinement_gain_interval_95"]
    print(f"refinement   {report['refinement_gain']:+.3f}  [{low:+.3f}, {high:+.3f}]  ({report['prompts']} prompts)")
    print(f"written: {args.out}/report.json, {args.out}/report.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
