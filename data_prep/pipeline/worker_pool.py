"""A function over chunks on all cores; who submits them takes the results in the order that suits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any

from specforge_dspine.utils.child_process import end_with_parent

Work = Callable[[Any], Any]

INLINE = 4
"""So few chunks are done here: starting processes would take longer."""

WAITING = 3
"""Chunks per worker that are under way; what is read ahead is bounded by it."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """Processes that run ``function`` on chunks, once there is enough to do; use it as a context.

    Args:
        prepare: returns ``function``, from ``arguments``; called once in every process.
    """

    def __init__(self, count: int, prepare: Callable[..., Work], *arguments: Any) -> None:
        self._count = count
        self._prepare = prepare
        self._arguments = arguments
        self._own: Work | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._first: list[Job] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def ahead(self) -> int:
        """Chunks to have under way, so that no worker waits."""
        return WAITING * self._count + 1

    def submit(self, chunk: Any) -> Job:
        """``function`` of a chunk, under way.

        Raises:
            ChildProcessError: a worker was killed.
        """
        job = Job(self, chunk)
        if self._pool is not None:
            with _told():
                job.future = self._pool.submit(_run, chunk)
        elif self._count > 1:
            self._first.append(job)
            if len(self._first) == INLINE:
                self._start_pool()
        return job

    def own(self, chunk: Any) -> Any:
        """``function`` of a chunk, here and now."""
        self._own = self._own or self._prepare(*self._arguments)
        return self._own(chunk)

    def _start_pool(self) -> None:
        self._pool = ProcessPoolExecutor(
            self._count,
            multiprocessing.get_context("spawn"),  # a fork would copy the locks of other threads
            initializer=_start,
            initargs=(os.getpid(), self._prepare, self._arguments),
        )
        for job in self._first:
            if not job.is_done:
                job.future = self._pool.submit(_run, job.chunk)
        self._first = []


class Job:
    """One chunk on its way through a worker."""

    def __init__(self, workers: Workers, chunk: Any) -> None:
        self.chunk = chunk
        self.future: Future[Any] | None = None
        self.is_done = False
        self._workers = workers

    def result(self) -> Any:
        """What ``function`` says; to be asked for once.

        Raises:
            ChildProcessError: a worker was killed.
        """
        self.is_done = True
        chunk, self.chunk = self.chunk, None
        if self.future is None:
            return self._workers.own(chunk)
        with _told():
            return self.future.result()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process was ended from outside, perhaps for want of memory; give fewer --workers, and the "
            "same command continues"
        ) from error


_function: Work


def _start(parent: int, prepare: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    """Readies a worker, which ends with its parent, whatever ends that."""
    global _function
    end_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _function = prepare(*arguments)


def _run(chunk: Any) -> Any:
    return _function(chunk)
