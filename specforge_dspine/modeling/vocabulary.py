"""The target's vocabulary: embedding and LM head, the mask token, and the ids that it can generate.

An LM head has V rows. A tokenizer often has fewer entries (Qwen3: 151936 rows, 151669 entries), and some of these
are placeholders. Training feeds the mask token in slots 1..M; decoding removes the rest before the top K (§6).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead
from torch import Tensor
from transformers import PreTrainedTokenizerBase

PLACEHOLDER = re.compile(r"reserved|unused|placeholder|extra_id|^<SPECIAL_\d+>$", re.IGNORECASE)
"""Names of added tokens without a meaning, as Llama, Gemma, T5 and Mistral write them."""

NAMED_IN_ERROR = 12  # reserved entries that an error message lists


def head_and_embedding(model_path: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Load the target's LM head E [V, H] and its embedding [V, H]."""
    tables = TargetEmbeddingsAndHead.from_pretrained(model_path, device=device, dtype=dtype)
    return tables.lm_head.weight, tables.embed_tokens.weight


def resolve_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, explicit: int | None) -> int:
    """Returns the id whose embedding fills slots 1..M: one that no text of the target holds.

    Tried in order: ``explicit`` (the recipe's ``model.mask_token_id``), the tokenizer's own mask token, the first
    of the V = ``vocab_rows`` rows after the tokenizer's entries. The pad token is never used: it is the end token
    of many targets (NeMo#2461).

    Raises:
        ValueError: an id outside the rows, one with a meaning of its own, or none; the message lists usable ids.
    """
    if explicit is not None:
        return _checked(tokenizer, vocab_rows, explicit, "model.mask_token_id")
    if tokenizer.mask_token_id is not None:
        return _checked(tokenizer, vocab_rows, tokenizer.mask_token_id, "the tokenizer's mask_token_id")
    entries = _entries(tokenizer)
    if entries < vocab_rows:
        return entries
    raise ValueError(
        f"this target has no mask token and no unused embedding row ({vocab_rows} rows, {entries} tokenizer "
        f"entries): set model.mask_token_id to a reserved id. {_advice(tokenizer, vocab_rows)}"
    )


class OutputVocabulary(NamedTuple):
    """What the target can generate: the ids below ``valid_size`` except ``excluded_ids`` (ascending)."""

    excluded_ids: list[int]
    valid_size: int


def output_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, mask_token_id: int) -> OutputVocabulary:
    """What the target can generate at all, out of V = ``vocab_rows``.

    ``valid_size`` counts the rows that the tokenizer reaches; all later rows are padding. Excluded are the mask
    token, ids that no entry uses, and added tokens whose name says placeholder (:data:`PLACEHOLDER`). Everything
    else stays, special tokens included. Excluding an id that the target does generate costs a rejection each
    time. Keeping one that it never generates costs nothing: the draft learns to avoid it.

    Raises:
        ValueError: ``mask_token_id`` is not one of the ``vocab_rows`` rows.
    """
    if not 0 <= mask_token_id < vocab_rows:
        raise ValueError(f"mask_token_id = {mask_token_id}: the embedding has rows 0 to {vocab_rows - 1}")
    valid = min(_entries(tokenizer), vocab_rows)
    unused = set(range(valid)) - set(tokenizer.get_vocab().values())
    placeholders = {k for k, text in _reserved(tokenizer).items() if PLACEHOLDER.search(text) and k < valid}
    return OutputVocabulary(sorted({mask_token_id} | unused | placeholders), valid)


def _checked(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, token_id: int, field: str) -> int:
    roles = [role for role in ("pad", "eos", "bos", "unk") if getattr(tokenizer, f"{role}_token_id") == token_id]
    known = token_id in tokenizer.get_vocab().values()
    text = tokenizer.convert_ids_to_tokens(token_id) if known else ""
    if not 0 <= token_id < vocab_rows:
        problem = f": the embedding has rows 0 to {vocab_rows - 1}."
    elif roles:
        problem = f" is the tokenizer's {' and '.join(roles)} token {text!r}; the mask needs an id of its own."
    elif known and token_id != tokenizer.mask_token_id and token_id not in _reserved(tokenizer):
        problem = f" is {text!r}, which occurs in the target's text; the mask needs an id of its own."
    else:
        return token_id
    raise ValueError(f"{field} = {token_id}{problem} {_advice(tokenizer, vocab_rows)}")


def _entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id: ``len(tokenizer)`` where the ids have no gap."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _reserved(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Added tokens by id that have no role and that the chat template never writes."""
    roles = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):  # several named templates
        template = "".join(template.values())
    added = {k: token.content for k, token in tokenizer.added_tokens_decoder.items()}
    return {k: text for k, text in added.items() if k not in roles and text not in template}


def _advice(tokenizer: PreTrainedTokenizerBase, vocab_rows: int) -> str:
    """Usable mask ids in words, placeholders first."""
    entries = _entries(tokenizer)
    reserved = sorted(
        ((k, text) for k, text in _reserved(tokenizer).items() if k < vocab_rows),
        key=lambda item: (PLACEHOLDER.search(item[1]) is None, item[0]),
    )
    parts = [f"rows {entries} to {vocab_rows - 1} are unused"] if entries < vocab_rows else []
    if reserved:
        names = ", ".join(f"{k} {text!r}" for k, text in reserved[:NAMED_IN_ERROR])
        parts.append(f"reserved entries of this tokenizer: {names}")
    if not parts:
        return "This tokenizer has no reserved entry: add one to it and to the target's embedding."
    return f"Ids that would do: {'; '.join(parts)}."
