"""A pool of worker processes for chunks; who submits them takes the results in the order that suits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from specforge_dspine.utils.child_process import end_with_parent
from specforge_dspine.utils.errors import RunError

Function = Callable[[Any], Any]
MAX_INLINE = 3  # so few chunks are done in this process: starting others would take longer
PER_WORKER = 3  # chunks under way, which bounds what is read ahead


class WorkerKilledError(RunError):
    """A worker process was ended from outside."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass
class Job:
    """One chunk on its way through a worker, or through this process where ``future`` is None."""

    chunk: Any
    future: Future[Any] | None = None


class WorkerPool:
    """Processes that apply a function to chunks, once there are enough of them; use it as a context.

    Args:
        prepare: returns the function, from ``arguments``; called once in every process.
    """

    def __init__(self, count: int, prepare: Callable[..., Function], *arguments: Any) -> None:
        self.ahead = PER_WORKER * count + 1  # chunks to have under way, so that no worker waits
        self._count = count
        self._prepare = prepare
        self._arguments = arguments
        self._function: Function | None = None
        self._executor: ProcessPoolExecutor | None = None
        self._first: list[Job] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, chunk: Any) -> Job:
        """Begin with a chunk.

        Raises:
            WorkerKilledError: a worker was killed.
        """
        job = Job(chunk)
        if self._executor is not None:
            self._send(job)
        elif self._count > 1:
            self._first.append(job)
            if len(self._first) > MAX_INLINE:
                self._executor = ProcessPoolExecutor(
                    self._count,
                    multiprocessing.get_context("spawn"),  # a fork would copy the locks of other threads
                    initializer=_start,
                    initargs=(os.getpid(), self._prepare, self._arguments),
                )
                for first in self._first:
                    self._send(first)
                self._first = []
        return job

    def result(self, job: Job) -> Any:
        """The function of the job's chunk; to be asked for once.

        Raises:
            WorkerKilledError: a worker was killed.
        """
        chunk, job.chunk = job.chunk, None
        if job.future is not None:
            with _killed_workers_explained():
                return job.future.result()
        self._function = self._function or self._prepare(*self._arguments)
        return self._function(chunk)

    def _send(self, job: Job) -> None:
        if self._executor is not None and job.chunk is not None:
            with _killed_workers_explained():
                job.future = self._executor.submit(_apply, job.chunk)


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
