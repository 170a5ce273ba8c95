"""What is a draft worth? It drafts and the target verifies, on evaluation sets, greedy and sampled.

    python -m specforge_dspine.evaluate --draft DIR --target DIR --sets humaneval mt-bench gsm8k=FILE --out DIR
        [--server URL] [--temperature 0 1] [--top-p P] [--top-k K] [--max-new-tokens N] [--limit N] [--seed N]

``--draft``: an export in either layout, or another's DFlash. ``--sets``: see evaluation/benchmarks.py. The target
verifies in this process (transformers, with its KV cache), or through ``--server``, an SGLang server with our capture
plugin, which takes prefix and block anew in every round. Greedy decoding of a ``captured=DIR`` set replays the
target's answers from there; ``--live N`` decodes N of them for real as well and demands the same rounds.

``--out`` gets every answer as it is finished (rounds.jsonl.partial, in the end rounds.jsonl) and result.json: τ with
its interval, acceptance by position, accepted lengths, per set and overall, each temperature apart (fields:
docs/metrics.md). The same command continues a run that was stopped, and leaves a finished one as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.evaluation.benchmarks import SYNTAX, EvaluationSet, open_set, skip_text
from specforge_dspine.evaluation.loading import (
    check_pair,
    draft_facts,
    dtype_of,
    open_draft,
    untrained_like,
    version_facts,
)
from specforge_dspine.evaluation.results import RESULT, ROUNDS, figures, table
from specforge_dspine.evaluation.runner import EvaluationRunner, ReplayMismatchError, Settings, TargetVerifier
from specforge_dspine.formats.writer import DTYPES
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.streaming.client import CaptureVerificationError
from specforge_dspine.streaming.feature_folder import check_features
from specforge_dspine.streaming.record import RecordError, TargetIdentity
from specforge_dspine.utils.chat_template import THINKING, check_template, end_ids, tokenizer_identity
from specforge_dspine.utils.cli import positive
from specforge_dspine.utils.files import read_jsonl, write_json
from specforge_dspine.utils.fingerprint import model_fingerprint
from specforge_dspine.utils.ledger import Ledger
from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions

VARIANTS = ("draft", "unrefined", "untrained")
THINKING_SAID = {True: "on", False: "off", None: "the template's default"}
SKIPS_SHOWN = 5  # of a set, on the screen; result.json has all


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line says; returns what result.json holds.

    Raises:
        ValueError: bad options, sets, drafts or features, or ``--out`` belongs to other inputs.
        ReplayMismatchError, CaptureVerificationError, RecordError, ConnectionError: as ``EvaluationRunner.run``.
    """
    settings = Settings(
        temperatures=tuple(dict.fromkeys(float(f"{t:g}") for t in options.temperature)),
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        thinking=THINKING[options.thinking],
        live=options.live,
    )
    device = compute_device(options.device)
    sets = open_sets(options.sets, options.limit)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    draft = open_draft(options.draft, tokenizer)
    if options.dtype is not None:
        draft = draft.to(DTYPES[options.dtype])
    target = TargetIdentity.from_config(str(options.target), draft.target_layer_ids, dtype_of(draft))
    check_pair(draft, target)
    for each in sets:
        if each.captured:
            check_features(Path(each.source), target)
        else:
            check_template(tokenizer, settings.thinking)
    if settings.live and target.dtype != "float32":
        raise ValueError(
            f"--live compares token by token, which only float32 bears (here {target.dtype}): a forward over a block "
            "rounds otherwise than one over the whole answer; leave it out, or capture and evaluate in float32"
        )
    ends = end_ids(options.target, tokenizer)
    facts = identity(options, settings, draft, target, tokenizer, sets, ends)
    ledger = Ledger([options.out / ROUNDS], "evaluate", facts | {"device": device.type}, overwrite=options.overwrite)
    if not ledger.is_finished():
        with ledger, TargetVerifier(target, device, options.server) as verifying:
            drafter = drafter_of(options.variant, draft.to(verifying.device), verifying)
            room = AutoConfig.from_pretrained(options.target).get_text_config().max_position_embeddings
            answering = EvaluationRunner(drafter, verifying, tokenizer, settings, ledger, stop=ends, room=room)
            ledger.finish(answering.run(sets), {})
    places = {"draft": str(options.draft), "target": target.model_path}
    result = facts | {"device": device.type, "paths": places}
    result |= figures(read_jsonl(options.out / ROUNDS), settings.temperatures, int(draft.block_size) - 1)
    write_json(options.out / RESULT, result)
    if not any(entry["overall"]["rounds"] for entry in result["temperatures"].values()):
        raise ValueError(f"no answer had a round; {options.out / RESULT} says why under answers_skipped")
    return result


def compute_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: there is none here.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch's ways to say so
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}; use cpu or cuda") from error
    return torch.device(name)


def open_sets(specs: Sequence[str], limit: int | None) -> list[EvaluationSet]:
    """The sets; what is skipped in them is said at once.

    Raises:
        ValueError: a set that cannot be read, or occurs twice.
    """
    sets = [open_set(spec, limit) for spec in specs]
    if len({each.name for each in sets}) < len(sets):
        raise ValueError(f"--sets {' '.join(specs)}: a set occurs twice; evaluate it again into another --out")
    for each in sets:
        for skip in each.skipped[:SKIPS_SHOWN]:
            print(f"{each.source}, skipped: {skip_text(skip)}", file=sys.stderr)
        if len(each.skipped) > SKIPS_SHOWN:
            print(f"{each.source}: {len(each.skipped)} entries skipped, see {RESULT}", file=sys.stderr)
    return sets


def drafter_of(variant: str, draft: DSpineDraftModel, target: TargetVerifier) -> BlockDrafter:
    """The draft as decoding uses it; without its refinement; or as training would start it."""
    if variant == "untrained":
        draft = untrained_like(draft, target.head)
    return BlockDrafter(draft, target.head, target.embedding, refine=variant != "unrefined")


def identity(
    options: argparse.Namespace,
    settings: Settings,
    draft: DSpineDraftModel,
    target: TargetIdentity,
    tokenizer: PreTrainedTokenizerBase,
    sets: Sequence[EvaluationSet],
    ends: Collection[int],
) -> dict[str, Any]:
    """What the answers depend on, as JSON values, by content: under these inputs they may be continued.

    A set's hash covers its prompts; records are named by their tokens, their states are the capture's word.
    """
    asked = not all(each.captured for each in sets)
    hashes = tokenizer_identity(options.target, tokenizer)
    facts = {
        "draft": draft_facts(options.draft, draft)
        | {
            "variant": options.variant,
            "refinement": draft.settings.refinement and options.variant != "unrefined",
        },
        "target": {name: value for name, value in asdict(target).items() if name != "model_path"}
        | {
            "fingerprint": model_fingerprint(options.target),
            "tokenizer": hashes["tokenizer"],
            "end_ids": sorted(ends),
            "verified_by": "SGLang server" if options.server else "transformers",
        },
        # Records hold prompts that somebody rendered before.
        "chat_template": {"sha256": hashes["chat_template"], "thinking": THINKING_SAID[settings.thinking]}
        if asked
        else None,
        "decoding": settings.to_json(),
        "limit": options.limit,
        "versions": version_facts(),
        "sets": {
            each.name: {
                "source": each.source,
                "instruction": each.instruction,
                "prompts": len(each.prompts),
                "sha256": each.sha256(),
                "skipped": each.skipped,
                "answers": "recorded" if each.captured else "decoded",
            }
            for each in sets
        },
    }
    return json.loads(json.dumps(facts))  # as the file gives it back


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (see the module's text)."""
    parser = argparse.ArgumentParser(
        prog="python -m specforge_dspine.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draft", type=Path, required=True, help="exported draft")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--sets", nargs="+", required=True, metavar="SET", help=SYNTAX)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", metavar="URL", help="an SGLang server with capture of the draft's layers")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="default 0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="of draft and target (default 1: all)")
    parser.add_argument("--top-k", type=int, default=0, help="of draft and target (default 0: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (default 256)")
    parser.add_argument("--limit", type=positive, help="prompts of each set (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thinking", choices=sorted(THINKING), default="none", help="the template's switch")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default=VARIANTS[0],
        help="the draft (default), the same without refinement, or a fresh one of its configuration",
    )
    parser.add_argument("--live", type=int, default=0, help="captured answers that are also decoded for real")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of draft and target (default: the draft's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--overwrite", action="store_true", help="replace whatever --out holds, once this is done")
    options = parser.parse_args(argv)
    try:
        with signals_as_exceptions():
            result = evaluate(options)
    except (ValueError, OSError, ReplayMismatchError, CaptureVerificationError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as received:
        print(f"stopped by {received}; the same command continues", file=sys.stderr)
        return 128 + received.signum
    print(table(result))
    print(f"written: {options.out}/{RESULT}, {options.out}/{ROUNDS}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
