"""SIGINT and SIGTERM as exceptions, so that every ``finally`` runs; children that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before a fork: a child must not load libraries


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


def end_with_parent(signum: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Call it in a fresh child: the kernel then sends ``signum`` when the parent's thread that started it is gone.

    With ``parent`` (a process id) the child ends at once if its parent is gone already.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
