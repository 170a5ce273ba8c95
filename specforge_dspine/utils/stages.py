"""Commands of this installation, run one after the other or side by side, as a job of several stages needs them."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from specforge_dspine.utils.child_process import end_with_parent
from specforge_dspine.utils.errors import RunError


class StageError(RunError):
    """A command ended with an error, which it has printed itself, or its log holds."""


class Stages:
    """Runs commands of this installation and notes how long each took, in seconds; leaving ends what still runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False
        self._starting = threading.Lock()  # what starts while all are ended would be forgotten

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the commands that are running; none starts any more."""
        with self._starting:
            self.ended = True
        for process in list(self.running):
            process.terminate()  # a stage ends its own servers and says how to continue
            process.wait()

    def run(
        self,
        module: str,
        *arguments: object,
        name: str | None = None,
        threads: int | None = None,
        log: Path | None = None,
    ) -> None:
        """``python -m module arguments``; on so many ``threads``, None: as torch likes. What it prints goes to the
        end of the file ``log``, None: where ours goes.

        Raises:
            StageError: it ended with an error, or all were ended.
        """
        words = [module, *map(str, arguments)]
        to = f" >> {shlex.quote(str(log))} 2>&1" if log else ""
        print(f"\n$ python -m {shlex.join(words)}{to}", flush=True)
        started = time.monotonic()
        # Idle threads that spin take the cores from the server beside them.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        with open(log, "ab") if log else contextlib.nullcontext() as stream, self._starting:
            if self.ended:
                raise StageError(f"python -m {module} was not started")
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                env=os.environ | environment,
                stdout=stream,
                stderr=stream,
                preexec_fn=end_with_parent,
            )
            self.running.add(process)
        code = process.wait()
        self.running.discard(process)
        if code:
            said = f"; {log} ends with: {last_line(log)}" if log else ""
            raise StageError(f"python -m {module} ended with status {code}{said}")
        self.seconds[name or module] = round(time.monotonic() - started, 1)


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def run_parallel(stages: Stages, jobs: Sequence[Callable[[], None]], max_workers: int = 2) -> None:
    """Run ``jobs``, ``max_workers`` at a time; if one fails, the others end."""
    with ThreadPoolExecutor(max_workers) as pool:
        waiting = [pool.submit(job) for job in jobs]
        try:
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        except BaseException:
            for job in waiting:
                job.cancel()
            stages.end()  # else leaving the pool waits for them
            raise
