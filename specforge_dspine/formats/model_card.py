"""Model card of an exported draft."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from specforge_dspine.formats.config_json import BRIDGE
from specforge_dspine.modeling.state_dict import TABLE
from specforge_dspine.utils.tables import markdown_table
from specforge_dspine.utils.versions import VERSION

CARD_TEXT = """---
{metadata}
---

# {kind} draft for {target}

A block drafter for speculative decoding in the {layout} layout, written by specforge-dspine {version}. It holds no
embedding and no LM head: both are the target's.

{facts}

{usage}

The license above is the training software's. The weights learned from the target: check its license too before you
publish them.
"""
LOAD = """Load it:

    from specforge_dspine.modeling.draft_model import DSpineDraftModel
    draft = DSpineDraftModel.from_pretrained("<this folder>")"""
SERVE = """Serve it:

    sglang serve --model-path <target> --speculative-algorithm {algorithm} \\
        --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {block_size} \\
        --tp-size 1 --page-size 1"""
UNVERIFIED = f"""

Never serve it as plain DFLASH. **Unverified**: the keys of `dflash_config.{BRIDGE}` are our reading
of an unpublished format. Loading in the released serving plugin was not tested."""


def model_card(payload: dict[str, Any], layout: str, base_model: str | None) -> ModelCard:
    """Return the card of a draft with the config.json ``payload``; ``base_model`` is the target's name, if known."""
    dflash, settings = payload["dflash_config"], payload["dspine_config"]
    kind = "DSpine" if settings["injection"] else "DFlash"
    shown = ("causal", "injection", "refinement", "alignment", "top_k", "transfer_rank", "message_size")
    facts = {name: payload[name] for name in ("block_size", "num_hidden_layers", "num_target_layers", "dtype")}
    facts |= {name: dflash[name] for name in ("target_layer_ids", "mask_token_id")}
    facts |= {name: settings[name] for name in (shown if settings["injection"] else shown[:4])}
    usage = LOAD
    if layout == "sglang":
        usage = SERVE.format(algorithm=kind.upper(), block_size=payload["block_size"])
    if BRIDGE in dflash:
        usage += UNVERIFIED
    if settings["injection"]:
        usage += f"\n\n`{TABLE}` is float32 and belongs to this draft: it must not be recomputed."
    metadata = ModelCardData(
        base_model=base_model,
        library_name="specforge-dspine",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", kind.lower(), layout],
    )
    target = base_model or f"a target of {payload['num_target_layers']} layers"
    table = "\n".join(markdown_table(("config.json", ""), facts.items()))
    text = CARD_TEXT.format(
        metadata=metadata.to_yaml(),
        kind=kind,
        target=target,
        layout=layout,
        version=VERSION,
        facts=table,
        usage=usage,
    )
    return ModelCard(text)
