"""Draft and target of an evaluation: opened, and checked against each other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from specforge_dspine.decoding.drafter import BlockDrafter
from specforge_dspine.decoding.loop import Target
from specforge_dspine.decoding.target_backends import ModelTarget, ServedTarget
from specforge_dspine.evaluation.options import DraftAndTargetOptions, Variant
from specforge_dspine.formats.reader import load_draft
from specforge_dspine.modeling.draft_model import DSpineDraftModel
from specforge_dspine.modeling.transfer_space import build_transfer_space
from specforge_dspine.modeling.vocabulary import head_and_embedding
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.record import TargetIdentity

PROBE_TOKENS = 8  # at least, to verify a server


class TargetVerifier(ExitStack):
    """The tables ``head`` E [V, H] and ``embedding`` [V, H], loaded at once; the verifying target opens on first use
    and closes with the context."""

    def __init__(self, identity: TargetIdentity, device: str, server: str | None = None) -> None:
        super().__init__()
        self.identity, self.device, self.server = identity, torch.device(device), server
        self.dtype: torch.dtype = getattr(torch, identity.dtype)
        self.head, self.embedding = head_and_embedding(identity.model_path, self.device, self.dtype)
        self._live: Target | None = None

    def live(self, probe: list[int]) -> Target:
        """Returns the target itself; a server is first verified on the ids ``probe`` (``verify_server``)."""
        if self._live is None and self.server is None:
            model: Any = AutoModelForCausalLM.from_pretrained(self.identity.model_path, dtype=self.dtype)
            self._live = ModelTarget(model.to(self.device), self.identity.layers)
        elif self._live is None:
            client = self.enter_context(SGLangClient(str(self.server)))
            client.verify_server(self.identity, self.head, (probe * PROBE_TOKENS)[: max(PROBE_TOKENS, len(probe))])
            self._live = ServedTarget(client, self.identity, self.head)
        return self._live


def open_pair(
    options: DraftAndTargetOptions, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None
) -> tuple[DSpineDraftModel, TargetIdentity]:
    """Open a draft of any layout, in ``dtype`` or its own, and identify the target that it drafts for.

    A CheckpointError names the damaged file of a draft, a ValueError the sizes of another target than the draft's.
    """
    draft = load_draft(options.draft, tokenizer=tokenizer).to_model().to(dtype)
    weights = str(draft.fc.weight.dtype).removeprefix("torch.")
    target = TargetIdentity.from_config(str(options.target), draft.target_layer_ids, weights)
    layers = {"num_target_layers": target.num_layers}
    for name, size in (layers | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}).items():
        if (own := getattr(draft.config, name)) != size:
            raise ValueError(f"the draft is for a target with {name}={own}, {options.target} has {size}")
    return draft, target


def drafter_of(variant: Variant, draft: DSpineDraftModel, target: TargetVerifier) -> BlockDrafter:
    """Returns the drafter of a draft's ``variant``, on the target's device."""
    if variant == "untrained":  # as training would start from the same configuration
        torch.manual_seed(0)
        fresh = DSpineDraftModel(draft.config).to(target.device, draft.fc.weight.dtype)
        if draft.settings.has_readouts:
            fresh.set_transfer_space(build_transfer_space(target.head, draft.settings.transfer_rank))
        draft = fresh
    return BlockDrafter(draft.to(target.device), target.head, target.embedding, refine=variant != "unrefined")
