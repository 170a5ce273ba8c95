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
LOAD = """## Load

    from specforge_dspine.modeling.draft_model import DSpineDraftModel
    draft = DSpineDraftModel.from_pretrained("<this folder>")"""
SERVE = """## Serve

    sglang serve --model-path <target> --speculative-algorithm {algorithm} \\
        --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {block_size} \\
        --tp-size 1 --page-size 1"""
UNVERIFIED = f"""

Never serve it as plain DFLASH. **Unverified**: the keys of `dflash_config.{BRIDGE}` are our reading of an
unpublished format. Loading in the released serving plugin was not tested."""


def model_card(payload: dict[str, Any], layout: str, base_model: str | None) -> ModelCard:
    """Return the card of a draft with the config.json ``payload``; ``base_model`` is the target's name, if known."""
    dflash, settings = payload["dflash_config"], payload["dspine_config"]
    is_dspine = settings["injection"]
    kind = "DSpine" if is_dspine else "DFlash"
    facts = {
        "block size (anchor included)": payload["block_size"],
        "layers": payload["num_hidden_layers"],
        'tapped target layers (0-based, "output of layer k")': dflash["target_layer_ids"],
        "target layers": payload["num_target_layers"],
        "mask token": dflash["mask_token_id"],
        "candidates a position": settings["top_k"],
        "dtype of the weights": payload["dtype"],
    }
    if is_dspine:
        facts["transfer rank, message size"] = f"{settings['transfer_rank']}, {settings['message_size']}"
        facts[f"`{TABLE}`"] = "float32; belongs to this draft and must not be recomputed"
    facts |= {name: settings[name] for name in ("causal", "injection", "refinement", "alignment")}
    serve = SERVE.format(algorithm=kind.upper(), block_size=payload["block_size"]) + (UNVERIFIED if is_dspine else "")
    metadata = ModelCardData(
        base_model=base_model,
        library_name="specforge-dspine",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", kind.lower(), layout],
    )
    return ModelCard(
        CARD_TEXT.format(
            metadata=metadata.to_yaml(),
            kind=kind,
            target=base_model or f"a target of {payload['num_target_layers']} layers",
            layout=layout,
            version=VERSION,
            facts="\n".join(markdown_table(("", ""), facts.items())),
            usage=LOAD if layout == "specforge" else serve,
        )
    )
