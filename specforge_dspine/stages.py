"""Commands of this installation, run one after the other or side by side, as a job of several stages needs them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class StageFailed(RuntimeError):
    """A command ended with an error, which it has printed itself."""


class Stages:
    """Runs commands of this installation and notes how long each took, in seconds; leaving ends what still runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the commands that are running; none starts any more."""
        self.ended = True
        for process in list(self.running):
            process.terminate()  # a stage ends its own servers and says how to continue
            process.wait()

    def run(self, module: str, *arguments: object, name: str | None = None, threads: int | None = None) -> None:
        """``python -m module arguments``; on so many ``threads``, None: as torch likes.

        Raises:
            StageFailed: it ended with an error, or all were ended.
        """
        if self.ended:
            raise StageFailed(f"python -m {module} was not started")
        words = [module, *map(str, arguments)]
        print(f"\n$ python -m {shlex.join(words)}", flush=True)
        started = time.monotonic()
        # Idle threads that spin take the cores from the server beside them.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        process = subprocess.Popen([sys.executable, "-m", *words], env=os.environ | environment)
        self.running.add(process)
        code = process.wait()
        self.running.discard(process)
        if code:
            raise StageFailed(f"python -m {module} ended with status {code}")
        self.seconds[name or module] = round(time.monotonic() - started, 1)


def together(stages: Stages, jobs: Sequence[Callable[[], None]], at_once: int = 2) -> None:
    """Run ``jobs``, ``at_once`` at a time; if one fails, the others end."""
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(job) for job in jobs]
        try:
            for done in waiting:
                done.result()
        except BaseException:
            for job in waiting:
                job.cancel()
            stages.end()  # else leaving the pool waits for them
            raise
