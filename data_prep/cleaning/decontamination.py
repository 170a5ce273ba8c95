"""Pieces of evaluation sets in prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

WORDS = 13  # so many consecutive words in common are no accident; shorter evaluation texts count as a whole


class Contamination:
    """The runs of ``WORDS`` words of evaluation ``texts``, each given with the name of where it is from."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._runs: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        for place, text in texts:
            words = words_of(text)
            if 0 < len(words) < WORDS:
                self._whole.setdefault(" ".join(words), place)
            for run in _runs(words):
                self._runs.setdefault(run, place)

    def __bool__(self) -> bool:
        return bool(self._runs or self._whole)

    def find(self, texts: Iterable[str]) -> str | None:
        """Where the first piece of an evaluation set in ``texts`` is from."""
        for text in texts:
            words = words_of(text)
            if len(words) < WORDS:
                found = self._whole.get(" ".join(words))
            else:
                found = next((self._runs[run] for run in _runs(words) if run in self._runs), None)
            if found is not None:
                return found
        return None


def _runs(words: list[str]) -> Iterator[str]:
    return (" ".join(words[k : k + WORDS]) for k in range(len(words) - WORDS + 1))


CJK = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"
)
"""Han characters and kana, for a character class; Korean has spaces."""
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
PIECE = re.compile(rf"[{CJK}]|[^\s{CJK}]+")  # with the punctuation at it; symbols alone are words too


def words_of(text: str) -> list[str]:
    """Case folded words, without punctuation."""
    return WORD.findall(text.casefold())
