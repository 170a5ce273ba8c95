"""The timing study: interventions on every held-out prompt, kept prompt by prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from specforge_dspine.decoding.drafter import BlockDrafter, draft_all_anchors
from specforge_dspine.evaluation.benchmarks import Prompt
from specforge_dspine.studies import report
from specforge_dspine.studies.branches import encode
from specforge_dspine.studies.inputs import StudyOptions, open_features, open_study, record_of
from specforge_dspine.studies.interventions import carried, codes, predecessor, proposals_right, timing, whole_blocks
from specforge_dspine.studies.statistics import intervention_figures
from specforge_dspine.utils.cli import option
from specforge_dspine.utils.files import read_jsonl, to_line
from specforge_dspine.utils.ledger import Ledger


class TimingOptions(StudyOptions):
    """Options of the timing study."""

    history: int | None = option("tokens before the new anchor; default: B/2 − 2", default=None, metavar="K")
    overwrite: bool = option("replace what --out holds", default=False)


def run_timing(options: TimingOptions) -> str:
    """Intervene on every prompt and write the results; returns the page that ``--out`` gets too."""
    drafter, target, facts = open_study(options)
    block = drafter.proposals + 1
    k = max(0, block // 2 - 2) if options.history is None else options.history
    if not 0 <= k <= block - 3:
        raise ValueError(f"--history {k}: with blocks of {block}, 0 to {block - 3} leave an anchor and a position")
    heldout = open_features(options.heldout, options.limit, target)
    facts |= {
        "study": "timing",
        "history": k,
        "anchors_per_sample": options.anchors,
        "limit": options.limit,
        "sources": {"heldout": {"path": str(options.heldout), "sha256": heldout.sha256()}},
    }
    path = options.out / "timing.jsonl"
    ledger = Ledger([path], "studies timing", facts, overwrite=options.overwrite)
    if not ledger.is_finished():
        with ledger:
            model: Any = AutoModelForCausalLM.from_pretrained(options.target, dtype=drafter.embedding.dtype)
            model = model.to(options.device).eval()
            done = {record["prompt"] for record in ledger.kept()}
            for prompt in tqdm(heldout.prompts, desc="interventions", unit=" prompt", smoothing=0):
                if prompt.name not in done:
                    ledger.keep(to_line(intervene(drafter, model, target.layers, prompt, k, options)))
                    ledger.commit()
            ledger.finish(len(heldout.prompts), {})
    records = read_jsonl(path)
    used = [record for record in records if record["blocks"]]
    if not used:
        raise ValueError(f"{options.heldout}: no response has {block} consecutive tokens, as a block needs")
    result = facts | {
        "samples": {
            "held-out prompts": len(used),
            "blocks": sum(record["blocks"] for record in used),
            "prompts whose response is too short": len(records) - len(used),
        },
        "recomputed_states_differ": max(record["deviation"] for record in used),
        "paper": {name: report.PAPER[name] for name in ("timing", "predecessor")},
        "seconds": round(sum(record["seconds"] for record in records), 1),
        **intervention_figures(used, block),
    }
    result["notes"] = report.remarks(result)
    report.draw_timing(options.out / "timing.png", result)
    report.draw_predecessor(options.out / "predecessor.png", result)
    return report.write_results(options.out, "timing", result, report.timing_markdown(result))


def intervene(
    drafter: BlockDrafter, model: Any, layers: Sequence[int], prompt: Prompt, k: int, options: TimingOptions
) -> dict[str, Any]:
    """The interventions on one prompt, as a line of timing.jsonl; ``layers`` of the target ``model`` are tapped."""
    started, record = time.monotonic(), record_of(prompt)
    ids, taps = (record[name].to(options.device) for name in ("input_ids", "hidden_states"))
    limits = {"limit": options.anchors, "seed": options.seed}
    anchors = whole_blocks(record["loss_mask"], drafter.proposals, prompt.name, **limits).to(options.device)
    line: dict[str, Any] = {"prompt": prompt.name, "blocks": len(anchors)}
    if len(anchors):
        proposed = draft_all_anchors(drafter, ids, taps[0], anchors).tokens
        branches = encode(model, layers, ids, anchors, proposed)
        deviation = (branches.taps[: len(ids)].float() - taps[0].float()).norm() / taps[0].float().norm()
        line |= {
            "deviation": float(deviation),
            "anchors": anchors.tolist(),
            "proposed": proposed.tolist(),
            **as_lists(proposals_right(branches, k)),
            "timing": {output: as_lists(each) for output, each in timing(drafter, branches, k).items()},
            "predecessor": as_lists(predecessor(drafter, branches)),
            "carried": as_lists(carried(drafter, branches)),
        }
        if drafter.draft.settings.injection and drafter.draft.settings.causal:
            line["codes"] = as_lists(codes(drafter, branches))
    return line | {"seconds": round(time.monotonic() - started, 3)}


def as_lists(values: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Counts or flags as lists of integers."""
    return {name: value.int().tolist() for name, value in values.items()}
