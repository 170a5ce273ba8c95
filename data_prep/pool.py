"""A function over chunks on all cores, with the results in the order of the chunks."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from types import TracebackType
from typing import Any

Work = Callable[[Any], Any]

INLINE = 4
"""So few chunks are done here: starting processes would take longer."""

WAITING = 3
"""Chunks per worker that are under way; what is read ahead is bounded by it."""

PR_SET_PDEATHSIG = 1


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

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """``function`` of every chunk, in order, a few chunks ahead of what is asked for.

        Raises:
            ChildProcessError: a worker was killed.
        """
        chunks = iter(chunks)
        first = list(islice(chunks, INLINE)) if self._pool is None and self._count > 1 else []
        if self._count == 1 or (self._pool is None and len(first) < INLINE):
            self._own = self._own or self._prepare(*self._arguments)
            yield from map(self._own, chain(first, chunks))
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._count,
                multiprocessing.get_context("spawn"),  # a fork would copy the locks of other threads
                initializer=_start,
                initargs=(os.getpid(), self._prepare, self._arguments),
            )
        waiting: deque[Future[Any]] = deque()
        try:
            for chunk in chain(first, chunks):
                waiting.append(self._pool.submit(_run, chunk))
                if len(waiting) > WAITING * self._count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker process was ended from outside, perhaps for want of memory; give fewer --workers, and the "
                "same command continues"
            ) from error


_function: Work


def _start(parent: int, prepare: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    """Readies a worker, which ends with its parent, whatever ends that."""
    global _function
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us in order
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _function = prepare(*arguments)


def _run(chunk: Any) -> Any:
    return _function(chunk)
