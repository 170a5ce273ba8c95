"""Children that end with their parent, whatever ends it. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before a fork: a child must not load libraries


def end_with_parent(signum: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Call it in a fresh child: the kernel then sends ``signum`` when the parent's thread that started it is gone.

    With ``parent`` (a process id) the child ends at once if its parent is gone already.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
