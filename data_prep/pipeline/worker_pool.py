"""A pool of worker processes for chunks; who submits them takes the results in the order that suits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from specforge_dspine.utils.child_process import end_with_parent
from specforge_dspine.utils.errors import RunError

Function = Callable[[Any], Any]
MAX_INLINE = 3
"""So few chunks are done in this process: starting others would take longer."""
PER_WORKER = 3
"""Chunks per worker that are under way; it bounds what is read ahead."""


class WorkerKilledError(RunError):
    """A worker process was ended from outside."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class WorkerPool:
    """Processes that apply a function to chunks, once there are enough of them; use it as a context.

    Args:
        prepare: returns the function, from ``arguments``; called once in every process.
    """

    def __init__(self, count: int, prepare: Callable[..., Function], *arguments: Any) -> None:
        self._count = count
        self._prepare = prepare
        self._arguments = arguments
        self._function: Function | None = None
        self._executor: ProcessPoolExecutor | None = None
        self._waiting: list[Job] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def ahead(self) -> int:
        """Chunks to have under way, so that no worker waits."""
        return PER_WORKER * self._count + 1

    def submit(self, chunk: Any) -> Job:
        """The function of a chunk, under way.

        Raises:
            WorkerKilledError: a worker was killed.
        """
        job = Job(self, chunk)
        if self._executor is not None:
            with _killed_workers_explained():
                job.future = self._executor.submit(_apply, chunk)
        elif self._count > 1:
            self._waiting.append(job)
            if len(self._waiting) > MAX_INLINE:
                self._start_workers()
        return job

    def apply_here(self, chunk: Any) -> Any:
        """The function of a chunk, in this process."""
        self._function = self._function or self._prepare(*self._arguments)
        return self._function(chunk)

    def _start_workers(self) -> None:
        self._executor = ProcessPoolExecutor(
            self._count,
            multiprocessing.get_context("spawn"),  # a fork would copy the locks of other threads
            initializer=_start,
            initargs=(os.getpid(), self._prepare, self._arguments),
        )
        for job in self._waiting:
            if not job.is_done:
                job.future = self._executor.submit(_apply, job.chunk)
        self._waiting = []


class Job:
    """One chunk on its way through a worker."""

    def __init__(self, pool: WorkerPool, chunk: Any) -> None:
        self.chunk = chunk
        self.future: Future[Any] | None = None
        self.is_done = False
        self._pool = pool

    def result(self) -> Any:
        """What the function returns; to be asked for once.

        Raises:
            WorkerKilledError: a worker was killed.
        """
        self.is_done = True
        chunk, self.chunk = self.chunk, None
        if self.future is None:
            return self._pool.apply_here(chunk)
        with _killed_workers_explained():
            return self.future.result()


@contextlib.contextmanager
def _killed_workers_explained() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise WorkerKilledError(
            "a worker process was ended from outside, perhaps for want of memory; give fewer --workers, and the "
            "same command continues"
        ) from error


_function: Function


def _start(parent: int, prepare: Callable[..., Function], arguments: tuple[Any, ...]) -> None:
    """Make a worker ready, which ends with its parent, whatever ends that."""
    global _function
    end_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _function = prepare(*arguments)


def _apply(chunk: Any) -> Any:
    return _function(chunk)
