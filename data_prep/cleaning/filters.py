"""Checks of a prompt that need that row alone; workers do them on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from data_prep.cleaning.conversations import read_messages
from data_prep.cleaning.decontamination import Contamination
from data_prep.cleaning.exact_dedup import normalized
from data_prep.pipeline.rows import DroppedRow, content_key, hash_64, map_rows, row_id
from data_prep.readers.chunks import Chunk
from specforge_dspine.utils.files import to_line
from specforge_dspine.utils.invalid_row import InvalidRow

SURE = 0.5
"""Probability from which a language is taken to be known; short texts are often undetermined, and stay."""
NO_LANGUAGE = ("und", "zxx")
"""The identifier's codes for too little text, and for numbers or code."""


@dataclass(frozen=True)
class Rules:
    """What a prompt must be. Lengths count the characters of system and user messages together.

    Attributes:
        heldout_share: prompts whose first turn's hash lies below this share of all hashes are held out.
        near: the similarity of near duplicates, None to leave them.
        languages: ISO 639 codes; none: any language.
    """

    max_turns: int | None = None
    min_chars: int = 1
    max_chars: int | None = None
    languages: tuple[str, ...] = ()
    heldout_share: float = 0.0
    near: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A row that may be kept: its line of output, and what is needed to compare it with others."""

    line: int | None
    heldout: bool
    key: int
    text: bytes
    signature: bytes | None


def prepare_screening(
    rules: Rules, evaluation: Sequence[tuple[str, str]]
) -> Callable[[Chunk], tuple[str, list[Candidate | DroppedRow]]]:
    """The function for workers: a chunk's source, and a candidate or the reason to drop it for each row."""
    contamination = Contamination(evaluation)

    def screen(chunk: Chunk) -> tuple[str, list[Candidate | DroppedRow]]:
        return map_rows(chunk, lambda line, entry: [_screen(chunk.source, line, entry, rules, contamination)])

    return screen


def _in_heldout_share(turn: str, share: float) -> bool:
    """Whether a prompt that begins with the normalized ``turn`` is held out: for ever, whatever file it is in."""
    return share > 0 and hash_64(turn) < share * 2**64


def _screen(source: str, line: int | None, entry: Any, rules: Rules, contamination: Contamination) -> Candidate:
    messages = read_messages(entry, rules.max_turns)
    prompts = [message for message in messages if message["role"] != "assistant"]
    texts = [message["content"] for message in prompts]
    length = sum(map(len, texts))
    if length < rules.min_chars or (rules.max_chars is not None and length > rules.max_chars):
        raise InvalidRow("length", f"{length} characters")
    compared = [normalized(text) for text in texts]
    first = 1 if messages[0]["role"] == "system" else 0
    heldout = _in_heldout_share(compared[first], rules.heldout_share)
    if not heldout and any(_in_heldout_share(turn, rules.heldout_share) for turn in compared[first + 1 :]):
        raise InvalidRow("a later turn is a held-out prompt", "it may be the first turn of a held-out row")
    if rules.languages:
        _check_language("\n".join(texts[first:]), rules.languages)
    if contamination and (place := contamination.find(texts[first:])) is not None:
        raise InvalidRow("in an evaluation set", place)
    key = content_key(message | {"content": text} for message, text in zip(prompts, compared, strict=True))
    signature = None
    if rules.near is not None:
        from data_prep.cleaning.near_dedup import signature as sign

        signature = sign(" ".join(compared))
    row = {"id": row_id(source, key), "source": source, "line": line, "messages": messages}
    return Candidate(line, heldout, key, to_line(row), signature)


def _check_language(text: str, wanted: Sequence[str]) -> None:
    language, probability = _identifier().classify(text)
    if probability >= SURE and language not in (*wanted, *NO_LANGUAGE):
        raise InvalidRow("language", f"{language} ({probability:.0%} sure)")


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
