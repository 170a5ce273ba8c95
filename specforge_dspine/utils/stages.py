"""Commands of this installation as the stages of a job, one after the other or in parallel."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.signals import end_with_parent

logger = logging.getLogger(__name__)


class StageError(RunError):
    """A command ended with an error, which it printed itself or its log holds."""


class Stages:
    """Runs commands and records how long each took (``seconds``); leaving the context ends those still running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False
        self._starting = threading.Lock()  # a command must not start while the others are being ended

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the running commands, and start no others."""
        with self._starting:
            self.ended = True
        for process in list(self.running):
            process.terminate()  # a stage ends its own servers and tells how to continue
            process.wait()

    def run(
        self,
        module: str,
        *arguments: object,
        name: str | None = None,
        threads: int | None = None,
        log: Path | None = None,
    ) -> None:
        """Run ``python -m module arguments`` to its end.

        Args:
            name: its key in ``seconds``; default: the module.
            threads: CPU threads; default: torch's own choice.
            log: file to append its output to; default: our own output.

        Raises:
            StageError: it ended with an error, or ``end`` was called.
        """
        words = [module, *map(str, arguments)]
        logger.info("\n$ python -m %s%s", shlex.join(words), f" >> {shlex.quote(str(log))} 2>&1" if log else "")
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
            reason = f"; {log} ends with: {last_line(log)}" if log else ""
            raise StageError(f"python -m {module} ended with status {code}{reason}")
        self.seconds[name or module] = round(time.monotonic() - started, 1)

    def run_parallel(self, jobs: Sequence[Callable[[], None]], max_workers: int = 2) -> None:
        """Call ``jobs``, which run commands, ``max_workers`` at a time; if one fails, the others end."""
        with ThreadPoolExecutor(max_workers) as pool:
            waiting = [pool.submit(job) for job in jobs]
            try:
                done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()
            except BaseException:
                for job in waiting:
                    job.cancel()
                self.end()  # else leaving the pool waits for them
                raise


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
