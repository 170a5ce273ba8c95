"""The DSpine draft model (§2–4, §6): DFlash's backbone made block-causal, with adjacent causal injection.

Variants leave out what they do not use: without injection and cosine alignment the draft is a plain DFlash.

A block holds the anchor token in slot 0 and the mask token's embedding in slots 1..M; slot t predicts the
token M positions at most after the anchor at the same position, ids[a + t]. The target's tapped layers,
fused by ``fc`` and ``hidden_norm``, are extra keys and values of every draft layer. The draft owns neither
an embedding nor an LM head: both are the target's.
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
    """``hidden`` norm(h_L) [R, N, B, H]; ``pre_injection`` u_L [R, N, B, H]; ``features`` of every layer for the
    alignment, None unless asked for and used: e_ℓ = f_ℓ(h_ℓ) [L, R, N, B, r] (cosine) or norm(h_ℓ) [.., H] (ce)."""

    hidden: Tensor
    pre_injection: Tensor
    features: Tensor | None


@register_draft
class DSpineDraftModel(DFlashDraftModel):
    """DFlash backbone + ``injection`` + the fixed code table (buffers ``transfer_codes``, ``transfer_ready``).

    ``injection`` is the whole of it, the readouts alone, or None, as ``dspine_config`` says.
    """

    injection: LayerReadouts | None

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
        if not settings.has_readouts:
            return
        table = torch.zeros(config.vocab_size, settings.transfer_rank, dtype=torch.float32)
        self.register_buffer(TABLE, table)
        self.register_buffer(READY, torch.zeros((), dtype=torch.bool))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DSpineDraftModel:
        """Move and cast as usual, except that no buffer falls below float32: neither the code table, which would
        lose codes, nor RoPE's frequencies, which would turn positions (by radians at 3000 tokens in bfloat16)."""
        wide = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize >= 4
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in wide:
            moved = module._buffers[name]
            if moved is not None and moved.dtype.itemsize < 4:
                module._buffers[name] = buffer.to(moved.device)
        return self

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load an exported folder, strictly, the table in float32; otherwise as in transformers.

        Raises:
            ValueError: a tensor is missing, unknown, of the wrong shape, not finite, or no code table, by name.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # so that they are reported, and refused here by name
        model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(problem):
                raise ValueError(f"{path}: {problem.replace('_', ' ')}: {sorted(map(str, info[problem]))}")
        check_tensors(model.state_dict(), model.config)
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
        """How known tokens enter the space: ids [..] → √r · C_ids [.., r], cast once, here."""
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
            attention_mask: as ``masks`` builds it.
            noise_embedding: [R, N·B, H], embeddings of the anchor and of mask tokens.
            target_hidden: [R, S, T·H], the tapped layers' outputs.
            predecessor_ids: [R, N, M], token ids[a + t − 1] of slots t = 1..M; only column 0, the anchor,
                is read where nothing is replaced.
            replaced: [R, N] (bool), blocks whose first ``replacement_layers`` layers receive the right
                predecessors' codes (§5, the curriculum); None: none.
            past_key_values: keys and values of earlier context, when decoding.
            with_features: also return e_ℓ for the layer alignment.
        """
        rows, count, proposals = predecessor_ids.shape
        shape = (rows, count, proposals + 1, -1)
        context = self.hidden_norm(self.fc(target_hidden))
        rotary = self.rotary_emb(noise_embedding, position_ids)
        anchor_only = torch.zeros(rows, count, proposals, dtype=torch.bool, device=predecessor_ids.device)
        anchor_only[..., 0] = True
        taught = anchor_only if replaced is None else anchor_only | replaced.unsqueeze(-1)
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
                known = taught if index < self.settings.replacement_layers else anchor_only
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
        """What the alignment compares with the label: e_ℓ = f_ℓ(h_ℓ) [.., r] of h_ℓ [.., H], or norm(h_ℓ) [.., H]."""
        if self.settings.alignment == "ce":
            return self.norm(state)
        return cast(LayerReadouts, self.injection).feature(layer, state)

    def refine(self, pre_injection: Tensor, predecessor_ids: Tensor) -> Tensor:
        """Last-write refinement (§6.2): redo the last layer's injection with known predecessors, then ``norm``.

        ``pre_injection`` u_{L,t} [.., H] and ``predecessor_ids`` [..] broadcast against each other; returns the
        refined state [.., H] in the dtype of ``pre_injection``, which decoding gives in float32.
        """
        last, injection = len(self.layers) - 1, cast(AdjacentCausalInjection, self.injection)
        receiver = injection.feature(last, pre_injection)
        codes = self.codes(predecessor_ids, pre_injection.dtype)
        return self.norm(injection.write(last, pre_injection, receiver, codes))

    def num_injection_parameters(self) -> int:
        """L·(r·H) + L·(H·a) + 3·(a·r) + a; fewer in variants."""
        return sum(parameter.numel() for parameter in self.injection.parameters()) if self.injection else 0
