"""Which vocabulary rows mean something: the mask token, and the ids that the target never generates.

An LM head has V rows, a tokenizer often fewer entries (Qwen3: 151936 rows, 151669 entries), and some of
these are placeholders. Training feeds the mask token in slots 1..M; decoding removes what cannot be right
before it takes the top K (§6).
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

PLACEHOLDER = re.compile(r"reserved|unused|placeholder|extra_id|^<SPECIAL_\d+>$", re.IGNORECASE)
"""Names by which vocabularies say that an added token stands for nothing (Llama, Gemma, T5, Mistral)."""

NAMED_IN_ERROR = 12


def resolve_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, explicit: int | None) -> int:
    """The id whose embedding fills slots 1..M; an id that no text of the target holds.

    Tried in order: ``explicit`` (the recipe's ``model.mask_token_id``), the tokenizer's own mask token, the
    first embedding row behind the tokenizer's entries. Nothing falls back to the pad token, which is the
    end token of many targets (NeMo#2461).

    Args:
        vocab_rows: V, the rows of the target's embedding.

    Raises:
        ValueError: an id outside of the rows, one that has a meaning of its own, or none to be had; the
            message lists ids of this tokenizer that would do.
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


def emittable(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, mask_token_id: int) -> tuple[list[int], int]:
    """What the target can generate at all: ``(excluded_ids, valid_vocab_size)``.

    ``valid_vocab_size`` is the number of rows that the tokenizer reaches; all later rows are padding.
    ``excluded_ids`` (ascending, all below ``valid_vocab_size`` except perhaps the mask) are the mask token,
    ids that no entry uses, and added tokens that call themselves placeholders (:data:`PLACEHOLDER`).
    Everything else stays, special tokens included: to exclude an id that the target does generate costs a
    rejection each time, while to keep one that it never generates costs nothing, since the draft learns
    to avoid it.

    Raises:
        ValueError: ``mask_token_id`` is not one of the ``vocab_rows`` rows.
    """
    if not 0 <= mask_token_id < vocab_rows:
        raise ValueError(f"mask_token_id = {mask_token_id}: the embedding has rows 0 to {vocab_rows - 1}")
    valid = min(_entries(tokenizer), vocab_rows)
    used = set(tokenizer.get_vocab().values())
    placeholders = {k for k, text in _reserved(tokenizer).items() if PLACEHOLDER.search(text)}
    excluded = {mask_token_id} | (set(range(valid)) - used) | {k for k in placeholders if k < valid}
    return sorted(excluded), valid


def _checked(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, token_id: int, field: str) -> int:
    if not 0 <= token_id < vocab_rows:
        raise ValueError(
            f"{field} = {token_id}: the embedding has rows 0 to {vocab_rows - 1}. " + _advice(tokenizer, vocab_rows)
        )
    roles = [role for role in ("pad", "eos", "bos", "unk") if getattr(tokenizer, f"{role}_token_id") == token_id]
    known = token_id in tokenizer.get_vocab().values()
    text = tokenizer.convert_ids_to_tokens(token_id) if known else ""
    if roles:
        problem = f"is the tokenizer's {' and '.join(roles)} token {text!r}"
    elif known and token_id != tokenizer.mask_token_id and token_id not in _reserved(tokenizer):
        problem = f"is {text!r}, which occurs in the target's text"
    else:
        return token_id
    raise ValueError(
        f"{field} = {token_id} {problem}; the mask needs an id of its own. {_advice(tokenizer, vocab_rows)}"
    )


def _entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id; equals ``len(tokenizer)`` where the ids have no gap."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _reserved(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Added tokens without a role of their own that the chat template never writes, by id."""
    roles = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):  # several named templates
        template = "".join(template.values())
    added = {k: token.content for k, token in tokenizer.added_tokens_decoder.items()}
    return {k: text for k, text in added.items() if k not in roles and text not in template}


def _advice(tokenizer: PreTrainedTokenizerBase, vocab_rows: int) -> str:
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
