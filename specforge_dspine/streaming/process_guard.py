"""A small process between a run and its server, so that the server never outlives the run.

``python -m specforge_dspine.streaming.process_guard OWNER_PID -- COMMAND…`` starts the command in a session of its
own. It then waits until the command ends, the owner is gone (also after SIGKILL: its child gets another parent), or
SIGTERM/SIGINT arrives. In every case the command's process group is ended: SIGTERM, then SIGKILL after ``GRACE_S``.
If the guard itself is killed, the kernel kills the command (``end_with_parent``), and SGLang's workers end with it by
the same means. Standard library only, so that it starts at once and stays small. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial

from specforge_dspine.utils.signals import end_with_parent

GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL. A server has nothing to save, and takes longer to end by itself."""

POLL_S = 0.2


def guard(owner: int, command: list[str]) -> int:
    """Run ``command`` until it ends, the owner is gone, or a signal arrives; return its exit status."""
    stopped = False

    def stop(signum: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    server = subprocess.Popen(command, start_new_session=True, preexec_fn=partial(end_with_parent, signal.SIGKILL))
    try:
        while server.poll() is None and os.getppid() == owner and not stopped:
            time.sleep(POLL_S)
    finally:
        end_group(server)
    return server.returncode


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """End the process group that ``leader`` leads: SIGTERM, up to ``GRACE_S`` seconds, SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    owner, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: python -m specforge_dspine.streaming.process_guard OWNER_PID -- COMMAND…")
    return guard(int(owner), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
