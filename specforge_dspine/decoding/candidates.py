"""The K candidates of each position (§6): V_t = top K of E · norm(h_{L,t}), ids that are never emitted excluded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_dspine.modeling.settings import DSpineSettings


def excluded_mask(settings: DSpineSettings, mask_token_id: int, vocab: int, device: torch.device) -> Tensor:
    """Returns a mask [V] (bool) of ids that the target never emits: padded rows, the mask id, ``excluded_ids``."""
    excluded = torch.zeros(vocab, dtype=torch.bool, device=device)
    excluded[settings.valid_vocab_size or vocab :] = True
    excluded[[mask_token_id, *settings.excluded_ids]] = True
    return excluded


def candidates(head: Tensor, hidden: Tensor, excluded: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns ids [.., M, K] and logits [.., M, K] of the backbone's top K, in float32 or wider.

    ``head`` E [V, H], ``hidden`` norm(h_L) [.., M, H], ``excluded`` [V] (bool). The best comes first; of equal logits
    the lower id. Which of several equal ones is the last candidate is the device's choice.
    """
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), head)  # one matrix product, not one per block
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(excluded, -torch.inf)
    values, ids = (top.reshape(*hidden.shape[:-1], k) for top in logits.topk(k, dim=-1))
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values
