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
def signals_as_exceptions() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into ``Interrupted``; later ones are ignored while cleaning up.

    Libraries on the way may catch it and raise an error of their own (SpecForge's acknowledgment does): it is the
    interruption that leaves the context all the same.
    """
    received: list[Interrupted] = []

    def unwind(signum: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        received.append(Interrupted(signum))
        raise received[0]

    before = {each: signal.signal(each, unwind) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        if received and error is not received[0]:
            raise received[0] from error
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
