"""The DSpine draft model (§2–§4, §6): DFlash's backbone made block-causal, with adjacent causal injection.

A block holds the anchor token in slot 0 and the mask token's embedding in slots 1..M. Slot t predicts the token at
its own position, ids[a + t]. The target's tapped layers, fused by ``fc`` and ``hidden_norm``, are extra keys and
values of every draft layer. Embedding and LM head are the target's; the draft owns neither.

Variants leave out what they do not use: without injection and cosine alignment the draft is a plain DFlash.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.dflash_kernels import DFlashKernels
from specforge.modeling.draft.registry import register_draft
from torch import Tensor
from transformers import Qwen3Config
from transformers.cache_utils import Cache

from specforge_dspine.modeling.injection import AdjacentCausalInjection, LayerReadouts
from specforge_dspine.modeling.settings import settings_of
from specforge_dspine.modeling.state_dict import READY, TABLE, check_tensors
from specforge_dspine.modeling.transfer_space import TransferSpace


class DraftOutput(NamedTuple):
    """States of all blocks."""

    hidden: Tensor  # norm(h_L) [R, N, B, H]
    pre_injection: Tensor  # u_L [R, N, B, H]
    # Of every layer, None unless asked for and used: e_ℓ = f_ℓ(h_ℓ) [L, R, N, B, r] (cosine), norm(h_ℓ) [.., H] (ce).
    features: Tensor | None


@register_draft
class DSpineDraftModel(DFlashDraftModel):
    """DFlash backbone + ``injection`` + the fixed code table (buffers ``transfer_codes``, ``transfer_ready``)."""

    injection: LayerReadouts | None  # an AdjacentCausalInjection, the readouts alone, or None: as dspine_config says
    config_class = Qwen3Config
    base_model_prefix = ""  # Qwen3's "model" would let a tensor named model.X pass for X

    def __init__(self, config: Qwen3Config, dflash_kernels: DFlashKernels | None = None) -> None:
        super().__init__(config, dflash_kernels)
        settings = settings_of(config)
        self.settings = settings
        layers, hidden, rank = config.num_hidden_layers, config.hidden_size, settings.transfer_rank
        self.injection = None
        if settings.injection:
            self.injection = AdjacentCausalInjection(layers, hidden, rank, settings.message_size)
            self.injection.reset_parameters()  # after the base class's post_init, which redraws linear layers
        elif settings.has_readouts:
            self.injection = LayerReadouts(layers, hidden, rank)
        if settings.has_readouts:
            self.register_buffer(TABLE, torch.zeros(config.vocab_size, rank, dtype=torch.float32))
            self.register_buffer(READY, torch.zeros((), dtype=torch.bool))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DSpineDraftModel:
        """Move and cast as usual, except that no buffer falls below float32.

        In bfloat16 the code table would lose codes, and RoPE's frequencies would turn positions (by radians at 3000
        tokens).
        """
        exact = {n: b for n, b in self.named_buffers() if b.is_floating_point() and b.dtype.itemsize >= 4}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            path, _, key = name.rpartition(".")
            moved = self.get_submodule(path).get_buffer(key)
            if moved.dtype.itemsize < 4:
                self.get_submodule(path)._buffers[key] = buffer.to(moved.device)
        return self

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load an exported folder as transformers does, but strictly, and with the table in float32.

        Raises:
            ValueError: a tensor is missing, unknown, of the wrong shape or not finite, or the code table is invalid.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # reported, and refused below by name
        model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(problem):
                raise ValueError(f"{path}: {problem.replace('_', ' ')}: {sorted(map(str, info[problem]))}")
        check_tensors(model.state_dict(), model)
        return (model, info) if wants_info else model

    @torch.no_grad()
    def set_transfer_space(self, space: TransferSpace) -> None:
        """Install a fresh draft's table C [V, r] and start every readout from Pᵀ.

        Raises:
            ValueError: the draft already has a table (a trained draft keeps its own), or the shapes differ.
        """
        assert self.injection is not None
        if bool(self.transfer_ready):
            raise ValueError("transfer_codes: this draft already has its table, which is never replaced")
        if space.codes.shape != self.transfer_codes.shape:
            raise ValueError(
                f"transfer_codes: expected {tuple(self.transfer_codes.shape)}, got {tuple(space.codes.shape)}"
            )
        self.transfer_codes.copy_(space.codes)
        self.transfer_ready.fill_(True)
        self.injection.reset_parameters(space.directions)

    def codes(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Known tokens in the transfer space: ids [..] → √r · C_ids [.., r]."""
        return (math.sqrt(self.settings.transfer_rank) * self.transfer_codes[ids]).to(dtype)

    def forward(
        self,
        position_ids: Tensor,
        attention_mask: Any,
        noise_embedding: Tensor,
        target_hidden: Tensor,
        predecessor_ids: Tensor,
        replaced: Tensor | None = None,
        past_key_values: Cache | None = None,
        with_features: bool = False,
    ) -> DraftOutput:
        """All blocks of a batch in one pass.

        Args:
            position_ids: [R, S + N·B], positions of the context and of every block's slots.
            attention_mask: as ``attention_mask.block_mask`` or ``flex_block_mask`` builds it.
            noise_embedding: [R, N·B, H], embeddings of the anchors and of mask tokens.
            target_hidden: [R, S, T·H], the tapped layers' outputs.
            predecessor_ids: [R, N, M], token ids[a + t − 1] of slots t = 1..M. Where nothing is replaced, only
                column 0, the anchor, is read.
            replaced: [R, N] (bool), blocks whose first ``replacement_layers`` layers receive the correct
                predecessors' codes (§5, the curriculum); None: none.
            past_key_values: keys and values of earlier context, when decoding.
            with_features: also return every layer's feature for the alignment.
        """
        sequences, count, proposals = predecessor_ids.shape
        shape = (sequences, count, proposals + 1, -1)
        context = self.hidden_norm(self.fc(target_hidden))
        rotary = self.rotary_emb(noise_embedding, position_ids)
        # Which slots know their predecessor: slot 1 always, and in the first layers all slots of replaced blocks.
        anchor_only = torch.zeros_like(predecessor_ids, dtype=torch.bool)
        anchor_only[..., 0] = True
        with_replaced = anchor_only if replaced is None else anchor_only | replaced.unsqueeze(-1)
        codes = self.codes(predecessor_ids, noise_embedding.dtype) if self.settings.injection else None
        state, pre_injection, features = noise_embedding, noise_embedding, []
        for index, layer in enumerate(self.layers):
            state = layer(
                hidden_states=state,
                target_hidden=context,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_value=past_key_values,
                use_cache=past_key_values is not None,
                position_embeddings=rotary,
            )
            pre_injection = injected = state.reshape(shape)
            if codes is not None:
                known = with_replaced if index < self.settings.replacement_layers else anchor_only
                injected = cast(AdjacentCausalInjection, self.injection)(index, pre_injection, codes, known)
            if with_features and self.settings.alignment != "off":
                features.append(self.alignment_feature(index, injected))
            state = injected.flatten(1, 2)
        return DraftOutput(
            hidden=self.norm(state).reshape(shape),
            pre_injection=pre_injection,
            features=torch.stack(features) if features else None,
        )

    def alignment_feature(self, layer: int, state: Tensor) -> Tensor:
        """What the alignment compares with the label: f_ℓ(h_ℓ) [.., r] of ``state`` h_ℓ [.., H], or norm(h_ℓ)."""
        if self.settings.alignment == "ce":
            return self.norm(state)
        return cast(LayerReadouts, self.injection).feature(layer, state)

    def refine(self, pre_injection: Tensor, predecessor_ids: Tensor) -> Tensor:
        """Last-write refinement (§6.2): redo the last layer's injection with known predecessors s, then ``norm``.

            norm(u + RMS(u) · W_L (g ⊙ A √r·C_s)),  g = σ(G_q f_L(u) + G_p √r·C_s + b)

        ``pre_injection`` u_{L,t} [.., H] and ``predecessor_ids`` [..] broadcast against each other. Returns the
        refined state [.., H] in the dtype of ``pre_injection``, which decoding gives in float32.
        """
        last, injection = len(self.layers) - 1, cast(AdjacentCausalInjection, self.injection)
        receiver = injection.feature(last, pre_injection)
        codes = self.codes(predecessor_ids, pre_injection.dtype)
        return self.norm(injection.write(last, pre_injection, receiver, codes))

    def num_injection_parameters(self) -> int:
        """L·(r·H) + L·(H·a) + 3·(a·r) + a; fewer in variants."""
        return sum(parameter.numel() for parameter in self.injection.parameters()) if self.injection else 0


def meta_draft(config: Qwen3Config) -> DSpineDraftModel:
    """Build a draft on the meta device: names and shapes of its tensors, without memory."""
    with torch.device("meta"):
        return DSpineDraftModel(config)
