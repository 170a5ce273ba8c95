"""Commands run in this process: their exit status and messages."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence


def succeed(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> None:
    """Run ``main`` with ``words``, to status 0."""
    assert main(words) == 0


def refuse(main: Callable[[Sequence[str]], int], words: Sequence[str], message: str, status: int = 2) -> str:
    """Run ``main`` with ``words``, to an error with ``status`` and a ``message`` (a pattern); returns its stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            found = main(words)
        except SystemExit as ended:  # of the parser
            found = ended.code
    assert found == status, stderr.getvalue()
    assert re.search(message, stderr.getvalue()), stderr.getvalue()
    return stderr.getvalue()
