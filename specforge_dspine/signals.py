"""SIGINT and SIGTERM as exceptions, so that every ``finally`` of a long job runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """SIGINT or SIGTERM, raised in the main thread so that every ``finally`` runs."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def unwinding_signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into ``Interrupted``; later ones are ignored while cleaning up."""

    def unwind(signum: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {each: signal.signal(each, unwind) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
