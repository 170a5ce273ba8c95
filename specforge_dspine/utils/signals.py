"""SIGINT and SIGTERM as exceptions, so that every ``finally`` of a long job runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """SIGINT or SIGTERM, as an exception in the main thread."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into ``Interrupted``; later ones are ignored during clean-up.

    A library in between may catch it and raise its own error, as SpecForge's acknowledgment does. The context still
    raises the interruption, with that error as its cause.
    """
    received: list[Interrupted] = []

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        received.append(Interrupted(signum))
        raise received[0]

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        if received and error is not received[0]:
            raise received[0] from error
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
