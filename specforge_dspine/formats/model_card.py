"""Model card of an exported draft."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from specforge_dspine.formats.config_json import BRIDGE
from specforge_dspine.utils.versions import VERSION

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
    dflash, settings, block_size = payload["dflash_config"], payload["dspine_config"], payload["block_size"]
    kind = "DSpine" if settings["injection"] else "DFlash"
    data = ModelCardData(
        base_model=base_model,
        library_name="specforge-dspine",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", kind.lower(), layout],
    )
    usage = LOAD if layout == "specforge" else SERVE.format(algorithm=kind.upper(), block_size=block_size)
    variants = ", ".join(f"{name} {settings[name]}" for name in ("causal", "injection", "refinement", "alignment"))
    return ModelCard(f"""---
{data.to_yaml()}
---

# {kind} draft for {base_model or f"a target of {payload['num_target_layers']} layers"}

A block drafter for speculative decoding in the {layout} layout, written by specforge-dspine {VERSION}. It holds no
embedding and no LM head: both are the target's. Weights are {payload["dtype"]}; a code table is float32, belongs to
this draft and must not be recomputed.

* block size {block_size} (anchor included), {payload["num_hidden_layers"]} layers
* tapped target layers {dflash["target_layer_ids"]} (0-based, "output of layer k")
* mask token {dflash["mask_token_id"]}, {settings["top_k"]} candidates a position; {variants}

{usage}{UNVERIFIED if BRIDGE in dflash else ""}

The license above is the training software's. The weights learned from the target: check its license too before you
publish them.
""")
