"""Checks of a prompt that need that row alone; workers do them on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from data_prep.cleaning.conversations import read_messages
from data_prep.cleaning.decontamination import Contamination
from data_prep.pipeline.rows import Results, content_key, hash_64, map_rows, row_id
from data_prep.readers.chunks import Chunk
from specforge_dspine.utils.cli import Options, option
from specforge_dspine.utils.errors import InvalidRow
from specforge_dspine.utils.files import to_line

SURE = 0.5  # probability from which a language is taken to be known; short texts are often undetermined, and stay
NO_LANGUAGE = ("und", "zxx")  # the identifier's codes for too little text, and for numbers or code


class Rules(Options):
    """What a prompt must be. Lengths count the characters of system and user messages together."""

    max_turns: int | None = option("user turns kept of each (default: all)", default=None, ge=1, metavar="N")
    min_chars: int = option("of system and user messages", default=1, ge=1, metavar="N")
    max_chars: int | None = option("of system and user messages", default=None, ge=1, metavar="N")
    language: tuple[str, ...] = option("ISO 639 codes, such as en de: drop others", default=(), metavar="CODE")
    heldout_share: float = option("of all prompts, by their first turn's hash", default=0.01, ge=0, lt=1, metavar="X")
    near: float | None = option(
        "drop prompts of this similarity, such as 0.8 (MinHash)", default=None, gt=0, le=1, metavar="J"
    )


@dataclass(frozen=True)
class Candidate:
    """A row that may be kept: its line of output, and what is needed to compare it with others."""

    heldout: bool
    key: int
    text: bytes
    signature: bytes | None


def prepare_screening(rules: Rules, evaluation: Sequence[tuple[str, str]]) -> Callable[[Chunk], Results[Candidate]]:
    """The function for workers: a candidate, or the reason to drop it, for each row of a chunk."""
    contamination = Contamination(evaluation)
    return lambda chunk: map_rows(
        chunk, lambda line, entry: [_screen(chunk.source, line, entry, rules, contamination)]
    )


def normalized(text: str) -> str:
    """The form in which texts are compared: case folded, white space collapsed."""
    return " ".join(text.casefold().split())


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
    if rules.language:
        _check_language("\n".join(texts[first:]), rules.language)
    if contamination and (place := contamination.find(texts[first:])) is not None:
        raise InvalidRow("in an evaluation set", place)
    key = content_key(message | {"content": text} for message, text in zip(prompts, compared, strict=True))
    signature = None
    if rules.near is not None:
        from data_prep.cleaning.near_dedup import signature as sign

        signature = sign(" ".join(compared))
    row = {"id": row_id(source, key), "source": source, "line": line, "messages": messages}
    return Candidate(heldout, key, to_line(row), signature)


def _check_language(text: str, wanted: Sequence[str]) -> None:
    language, probability = _identifier().classify(text)
    if probability >= SURE and language not in (*wanted, *NO_LANGUAGE):
        raise InvalidRow("language", f"{language} ({probability:.0%} sure)")


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
