"""A pool of worker processes for chunks; who submits them takes the results in the order that suits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.signals import end_with_parent

Function = Callable[[Any], Any]
MAX_INLINE = 3  # the first chunks are done in this process: for so few starting others would take longer
PER_WORKER = 3  # chunks under way, which bounds what is read ahead


class WorkerKilledError(RunError):
    """A worker process was ended from outside."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class WorkerPool:
    """Processes that apply the function ``prepare(*arguments)`` to chunks, once there are enough; for ``with``."""

    def __init__(self, count: int, prepare: Callable[..., Function], *arguments: Any) -> None:
        self.ahead = PER_WORKER * count + 1  # chunks to have under way, so that no worker waits
        self._count = count
        self._prepare = partial(prepare, *arguments)
        self._here: Function | None = None
        self._submitted = 0
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the workers; a ``BrokenProcessPool`` inside of the context becomes a WorkerKilledError."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise WorkerKilledError(
                "a worker process was ended from outside, perhaps for want of memory; give fewer --workers, and the "
                "same command continues"
            ) from error

    def submit(self, chunk: Any) -> Callable[[], Any]:
        """Begin with a chunk; returns a function that waits for the result."""
        self._submitted += 1
        if self._count == 1 or self._submitted <= MAX_INLINE:
            return partial(self._apply_here, chunk)
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._count,
                multiprocessing.get_context("spawn"),  # a fork would copy the locks of other threads
                initializer=_start,
                initargs=(os.getpid(), self._prepare),
            )
        return self._executor.submit(_apply, chunk).result

    def _apply_here(self, chunk: Any) -> Any:
        self._here = self._here or self._prepare()
        return self._here(chunk)


_function: Function


def _start(parent: int, prepare: Callable[[], Function]) -> None:
    """Make a worker ready, which ends with its parent, whatever ends that."""
    global _function
    end_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _function = prepare()


def _apply(chunk: Any) -> Any:
    return _function(chunk)
