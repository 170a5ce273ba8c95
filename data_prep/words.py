"""What counts as a word when texts are compared: between spaces, or one character where a script has no spaces."""

from __future__ import annotations

import re

CJK = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"
)
"""Han characters and kana, for a character class; Korean has spaces."""

WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
PIECE = re.compile(rf"[{CJK}]|[^\s{CJK}]+")


def words_of(text: str) -> list[str]:
    """Case folded words, without punctuation."""
    return WORD.findall(text.casefold())


def pieces_of(text: str) -> list[str]:
    """Words with the punctuation at them; symbols alone are words too."""
    return PIECE.findall(text)
