"""What an evaluation depends on: draft, target, sets, decoding and software, by content."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specforge_dspine.evaluation.benchmarks import EvaluationSet
from specforge_dspine.evaluation.options import EvaluateOptions
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.streaming.record import TargetIdentity
from specforge_dspine.utils.chat_template import tokenizer_identity
from specforge_dspine.utils.files import as_json, model_fingerprint
from specforge_dspine.utils.versions import VERSION, installed

SOFTWARE = ("torch", "transformers", "sglang", "specforge")
DECODING = {"temperature", "top_p", "top_k", "max_new_tokens", "seed", "thinking", "verify_live"}  # options


def evaluation_facts(
    options: EvaluateOptions,
    draft: DSpineDraftModel,
    target: TargetIdentity,
    tokenizer: PreTrainedTokenizerBase,
    sets: Sequence[EvaluationSet],
    stop: Collection[int],
) -> dict[str, Any]:
    """Returns what the responses depend on, as JSON values: under the same facts an evaluation may be continued.

    A set's hash covers its prompts; captured records are named by their tokens, their states are not hashed.
    """
    hashes = tokenizer_identity(options.target, tokenizer)
    thinking = "the template's default" if options.thinking == "none" else options.thinking
    template = {"sha256": hashes["chat_template"], "thinking": thinking}
    refines = draft.settings.refinement and options.variant != "unrefined"
    facts = {
        "draft": draft_facts(options.draft, draft) | {"variant": options.variant, "refinement": refines},
        "target": {name: value for name, value in asdict(target).items() if name != "model_path"}
        | {
            "fingerprint": model_fingerprint(options.target),
            "tokenizer": hashes["tokenizer"],
            "end_ids": sorted(stop),
            "verified_by": "SGLang server" if options.server else "transformers",
        },
        # Captured prompts were rendered before.
        "chat_template": None if all(each.captured for each in sets) else template,
        "decoding": options.model_dump(include=DECODING),
        "limit": options.limit,
        "versions": version_facts(*SOFTWARE),
        "sets": {
            each.name: {
                "source": each.source,
                "instruction": each.instruction,
                "prompts": len(each.prompts),
                "sha256": each.sha256(),
                "skipped": each.skipped,
                "responses": "captured" if each.captured else "decoded",
            }
            for each in sets
        },
        "device": options.device.partition(":")[0],
    }
    return dict(as_json(facts))


def draft_facts(folder: Path, draft: DSpineDraftModel) -> dict[str, Any]:
    """Returns the fingerprint and the kind of a draft."""
    names = ("causal", "injection", "refinement", "top_k")
    facts = {"fingerprint": model_fingerprint(folder), "block_size": draft.block_size, "layers": len(draft.layers)}
    return facts | {name: getattr(draft.settings, name) for name in names}


def version_facts(*names: str) -> dict[str, str | None]:
    """Returns the versions of this package and of the distributions ``names``."""
    return {name: installed(name) for name in names} | {"specforge_dspine": VERSION}
