"""What is a draft worth? It drafts and the target verifies, on evaluation sets, greedy and sampled.

    python -m specforge_dspine.evaluate --draft DIR --target DIR --sets humaneval mt-bench gsm8k=FILE --out DIR
        [--server URL] [--temperature 0 1] [--top-p P] [--top-k K] [--max-new-tokens N] [--limit N] [--seed N]

``--draft``: an export of either flavour, or another's DFlash. ``--sets``: see specforge_dspine/sets.py. The target
verifies in this process (transformers, with its KV cache), or through ``--server``, an SGLang server with our capture
plugin, which takes prefix and block anew in every round. Greedy decoding of a ``captured=DIR`` set replays the
target's answers from there; ``--live N`` decodes N of them for real as well and demands the same rounds.

``--out`` gets every answer as it is finished (rounds.jsonl.partial, in the end rounds.jsonl) and result.json: τ with
its interval, acceptance by position, accepted lengths, per set and overall, each temperature apart (fields:
docs/metrics.md). The same command continues a run that was stopped, and leaves a finished one as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from data_prep.chat import THINKING, check_template
from data_prep.files import read_jsonl
from data_prep.ledger import Ledger
from specforge_dspine.acceptance import over_sets, summary
from specforge_dspine.answering import Answering, LiveMismatch, Record, Settings, Verifying
from specforge_dspine.drafting import BlockDrafter
from specforge_dspine.export import DTYPES, load_dflash, load_draft
from specforge_dspine.fingerprint import model_fingerprint
from specforge_dspine.formats import CONFIG, integer, section
from specforge_dspine.model import DSpineDraftModel
from specforge_dspine.plan import check_features
from specforge_dspine.reference import read_json
from specforge_dspine.rounds import Trace
from specforge_dspine.rundir import write_json
from specforge_dspine.sets import SYNTAX, EvaluationSet, open_set, skip_text
from specforge_dspine.signals import Interrupted, unwinding_signals
from specforge_dspine.stream.client import StreamProofError
from specforge_dspine.stream.record import RecordError, TargetIdentity
from specforge_dspine.transfer import build_transfer_space
from specforge_dspine.version import VERSION, installed
from specforge_dspine.vocabulary import emittable

ROUNDS, RESULT = "rounds.jsonl", "result.json"
VARIANTS = ("draft", "unrefined", "untrained")
SKIPS_SHOWN = 5  # of a set, on the screen; result.json has all


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line says; returns what result.json holds.

    Raises:
        ValueError: bad options, sets, drafts or features, or ``--out`` belongs to other inputs.
        LiveMismatch, StreamProofError, RecordError, ConnectionError: as ``Answering.run``.
    """
    settings = Settings(
        temperatures=tuple(dict.fromkeys(options.temperature)),
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        thinking=THINKING[options.thinking],
        live=options.live,
    )
    sets = open_sets(options.sets, options.limit)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    draft = open_draft(options.draft, tokenizer)
    if options.dtype is not None:
        draft = draft.to(DTYPES[options.dtype])
    target = TargetIdentity.from_config(str(options.target), draft.target_layer_ids, dtype_of(draft))
    check_pair(draft, target)
    for each in sets:
        if each.name == "captured":
            check_features(Path(each.source), target)
        else:
            check_template(tokenizer, settings.thinking)
    facts = identity(options, settings, draft, target, tokenizer, sets)
    ledger = Ledger([options.out / ROUNDS], "evaluate", facts, overwrite=options.overwrite)
    if not ledger.is_finished():
        with ledger, Verifying(target, torch.device(options.device), options.server) as verifying:
            drafter = drafter_of(options.variant, draft.to(verifying.device), verifying)
            ends = end_tokens(options.target, tokenizer)
            room = AutoConfig.from_pretrained(options.target).get_text_config().max_position_embeddings
            answering = Answering(drafter, verifying, tokenizer, settings, ledger, stop=ends, room=room)
            ledger.finish(answering.run(sets), {})
    result = facts | figures(read_jsonl(options.out / ROUNDS), settings.temperatures, int(draft.block_size) - 1)
    write_json(options.out / RESULT, result)
    return result


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


def open_draft(folder: Path, tokenizer: PreTrainedTokenizerBase) -> DSpineDraftModel:
    """An export of ours, of either flavour, or a DFlash draft of somebody else.

    Raises:
        CheckpointError: it is neither, or damaged, by name.
    """
    payload = read_json(folder / CONFIG)
    if "dspine_config" in payload or "dflash_config" not in payload:
        return load_draft(folder)
    mask = integer(section(payload, "dflash_config"), "mask_token_id", "dflash_config.")
    return load_dflash(folder, emittable(tokenizer, integer(payload, "vocab_size"), mask))


def drafter_of(variant: str, draft: DSpineDraftModel, target: Verifying) -> BlockDrafter:
    """The draft as decoding uses it; without its refinement; or as training would start it."""
    if variant == "untrained":
        draft = untrained_like(draft, target.head)
    return BlockDrafter(draft, target.head, target.embedding, refine=variant != "unrefined")


def untrained_like(draft: DSpineDraftModel, head: Tensor, seed: int = 0) -> DSpineDraftModel:
    """A draft of the same configuration as training would start from."""
    torch.manual_seed(seed)
    fresh = DSpineDraftModel(draft.config).to(head.device, draft.fc.weight.dtype)
    if draft.settings.has_readouts:
        fresh.set_transfer_space(build_transfer_space(head, draft.settings.transfer_rank))
    return fresh.eval()


def dtype_of(draft: DSpineDraftModel) -> str:
    """The dtype of the draft's weights, by name."""
    return str(draft.fc.weight.dtype).removeprefix("torch.")


def check_pair(draft: DSpineDraftModel, target: TargetIdentity) -> None:
    """Was the draft trained for a target of these sizes?

    Raises:
        ValueError: a size differs, with both values.
    """
    sizes = {
        "num_target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    for name, found in sizes.items():
        if getattr(draft.config, name) != found:
            raise ValueError(
                f"the draft is for a target with {name}={getattr(draft.config, name)}, "
                f"{target.model_path} has {found}"
            )


def end_tokens(target: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end an answer: the generation config's, and the tokenizer's end token."""
    path = target / "generation_config.json"
    listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    ends = set(listed) if isinstance(listed, list) else {listed}
    return {k for k in ends | {tokenizer.eos_token_id} if k is not None}


def identity(
    options: argparse.Namespace,
    settings: Settings,
    draft: DSpineDraftModel,
    target: TargetIdentity,
    tokenizer: PreTrainedTokenizerBase,
    sets: Sequence[EvaluationSet],
) -> dict[str, Any]:
    """All that the answers depend on, as JSON values: the inputs under which they may be continued."""
    method = draft.settings
    template = str(tokenizer.chat_template)
    facts = {
        "draft": {
            "path": str(options.draft),
            "fingerprint": model_fingerprint(options.draft),
            "variant": options.variant,
            "block_size": draft.block_size,
            "layers": len(draft.layers),
            "causal": method.causal,
            "injection": method.injection,
            "refinement": method.refinement and options.variant != "unrefined",
            "top_k": method.top_k,
        },
        "target": asdict(target)
        | {
            "fingerprint": model_fingerprint(options.target),
            "verified_by": "SGLang server" if options.server else "transformers",
        },
        "chat_template": {
            "sha256": hashlib.sha256(template.encode()).hexdigest() if tokenizer.chat_template else None,
            "thinking": options.thinking,
        },
        "decoding": settings.to_json(),
        "limit": options.limit,
        "versions": {name: installed(name) for name in ("torch", "transformers", "sglang", "specforge")}
        | {"specforge_dspine": VERSION},
        "sets": {
            each.name: {
                "source": each.source,
                "instruction": each.instruction,
                "prompts": len(each.prompts),
                "sha256": each.sha256(),
                "skipped": each.skipped,
            }
            for each in sets
        },
    }
    return json.loads(json.dumps(facts))  # as the file gives it back


def figures(records: Sequence[Record], temperatures: Sequence[float], proposals: int) -> dict[str, Any]:
    """The results: for each temperature the sets, all answers together, and the mean over sets."""
    by_temperature = {}
    for temperature in temperatures:
        sets = traces_of(records, temperature)
        if sets:
            by_temperature[f"{temperature:g}"] = {
                "overall": summary([trace for traces in sets.values() for trace in traces], proposals),
                "mean_over_sets": over_sets(sets),
                "sets": {name: summary(traces, proposals) for name, traces in sets.items()},
            }
    return {
        "interval": "bootstrap over prompts, 10000 resamples",
        "decoded_live": sum(bool(record.get("live")) for record in records),
        "answers_skipped": [record for record in records if "skipped" in record],
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "temperatures": by_temperature,
    }


def traces_of(records: Sequence[Record], temperature: float) -> dict[str, list[Trace]]:
    """The decoded answers of one temperature, by set."""
    sets: dict[str, list[Trace]] = {}
    for record in records:
        if record["temperature"] == temperature and "trace" in record:
            sets.setdefault(record["set"], []).append(Trace.from_json(record["trace"]))
    return sets


def table(result: dict[str, Any]) -> str:
    """τ of every set and temperature as aligned text."""
    lines = [
        f"{'set':<16} {'T':>4} {'τ':>7}  {'95 %':<16} {'rounds':>7} {'tokens':>7}  accepted to position 1, 2, .."
    ]
    for temperature, entry in result["temperatures"].items():
        rows = entry["sets"] | {"all": entry["overall"]}
        for name, found in rows.items():
            low, high = found["tau_interval_95"]
            shares = " ".join(f"{share:.1%}" for share in found["acceptance_by_position"])
            lines.append(
                f"{name:<16} {temperature:>4} {found['tau']:>7.3f}  {f'[{low:.3f}, {high:.3f}]':<16} "
                f"{found['rounds']:>7} {found['tokens']:>7}  {shares}"
            )
        lines.append(f"{'mean over sets':<16} {temperature:>4} {entry['mean_over_sets']['tau']:>7.3f}")
    return "\n".join(lines)


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
    parser.add_argument("--limit", type=int, help="prompts of each set (default: all)")
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
        with unwinding_signals():
            result = evaluate(options)
    except (ValueError, OSError, LiveMismatch, StreamProofError, RecordError) as error:
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
