"""A pool of SGLang servers of one target, shared by many threads.

A server that fails rests, twice as long each time, and is checked again before it gets the next request: whatever was
started there in the meantime must be the same target. Requests go to the others until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from specforge_dspine.streaming.client import Completion, RequestRefused, SGLangClient
from specforge_dspine.utils.errors import InvalidRow, RunError

logger = logging.getLogger(__name__)

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0  # how long a failed server is left alone: the first time, and at most
ATTEMPTS = 5  # so often a request is sent to servers that work; then the failure is its own
MAX_FAILED_REQUESTS = 8  # after so many in a row that all attempts failed on, the requests are not at fault
INFO_TIMEOUT_S = 60.0


class WrongServerError(ValueError):
    """A server that does not serve the target as asked for; the message says what differs and what to do."""


class ServersLostError(RunError):
    """No server works any longer."""


@dataclass(frozen=True)
class Requirements:
    """What every server must serve."""

    model: str  # the target's path or name there
    dtype: str | None = None  # None for any
    deterministic: bool = False  # whether it must draw by the seed of a request


def check_server(url: str, required: Requirements) -> str:
    """The dtype of a running server that serves what is required; else a WrongServerError or ConnectionError."""
    with requests.Session() as session:
        session.trust_env = False  # as SGLangClient does
        try:
            response = session.get(f"{url.rstrip('/')}/server_info", timeout=INFO_TIMEOUT_S)
            response.raise_for_status()
            info = response.json()
        except (requests.RequestException, ValueError) as error:
            raise ConnectionError(f"--server {url} does not answer ({error}); is an SGLang server there?") from error
    served, dtype = str(info["model_path"]), str(info["dtype"])
    if served != required.model and Path(served).resolve() != Path(required.model).resolve():
        raise WrongServerError(
            f"--server {url} serves {served}, not {required.model}: start it with this target, or say with "
            "--served-as that the target has that name there"
        )
    if required.dtype not in (None, dtype):
        raise WrongServerError(f"--server {url} computes in {dtype}, not in {required.dtype}; responses would differ")
    if required.deterministic and not info.get("enable_deterministic_inference"):
        raise WrongServerError(
            f"--server {url} ignores seeds: start it with --enable-deterministic-inference (which SGLang offers on "
            "GPUs), or leave --seed out, and draws differ from run to run"
        )
    return dtype


@dataclass
class _Server:
    url: str
    busy: int = 0
    failures: int = 0
    rests_until: float = 0.0
    problem: str = ""


class ServerPool:
    """Servers of one target, for any number of threads.

    All ``urls`` were found to serve what is ``required``. After ``timeout_s`` seconds a request counts as lost, and
    ``patience_s`` seconds after the last working server failed, nobody waits any longer.
    """

    def __init__(self, urls: Sequence[str], required: Requirements, timeout_s: float, patience_s: float) -> None:
        self._required, self._timeout_s, self._patience_s = required, timeout_s, patience_s
        self._servers = [_Server(url) for url in urls]
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._lost_since: float | None = None  # when the last server that worked failed
        self._failed_requests = 0  # in a row

    def generate(self, prompt: list[int], **options: Any) -> Completion:
        """As ``SGLangClient.generate``, for one prompt; an InvalidRow if servers that work refuse it or fail on it.

        A WrongServerError if a URL serves another target now, a ServersLostError if no server works any longer.
        """
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            server = self._take()
            try:
                (completion,) = self._client(server.url).generate([prompt], **options)
            except RequestRefused as error:
                raise InvalidRow("refused by the server", str(error)) from error
            except ConnectionError as error:
                problem = error
                self._note_failure(server, error)
            else:
                with self._lock:
                    self._lost_since, self._failed_requests = None, 0
                return completion
            finally:
                with self._lock:
                    server.busy -= 1
        with self._lock:
            self._failed_requests += 1
            if self._failed_requests >= MAX_FAILED_REQUESTS:
                raise ServersLostError(
                    f"the servers say that they run, but failed on {MAX_FAILED_REQUESTS} requests in a row, "
                    f"{ATTEMPTS} times on each ({problem}); look at their logs, and the same command continues"
                )
        raise InvalidRow("the server fails on it", f"{ATTEMPTS} attempts, the last: {problem}")

    def _take(self) -> _Server:
        """The least busy server that works, perhaps after a rest."""
        while True:
            with self._lock:
                now = time.monotonic()
                ready = (server for server in self._servers if server.rests_until <= now)
                server = min(ready, key=lambda each: each.busy, default=None)
                if server is not None and not server.failures:
                    server.busy += 1
                    return server
                if server is not None:
                    server.rests_until = now + LONGEST_REST_S  # one thread checks it, the others wait
                elif self._lost_since is not None and now - self._lost_since > self._patience_s:
                    problems = "; ".join(each.problem for each in self._servers)
                    raise ServersLostError(
                        f"no server has answered for {self._patience_s:.0f} s ({problems}). Start one again; the "
                        "same command continues"
                    )
            if server is None:
                time.sleep(0.1)
                continue
            try:
                check_server(server.url, self._required)
            except ConnectionError as error:
                self._note_failure(server, error)
            else:
                with self._lock:
                    server.failures, server.rests_until, self._lost_since = 0, 0.0, None

    def _note_failure(self, server: _Server, error: Exception) -> None:
        with self._lock:
            if server.failures == 0:
                logger.warning("%s failed and rests: %s", server.url, error)
            server.failures += 1
            if self._lost_since is None and all(each.failures for each in self._servers):
                self._lost_since = time.monotonic()
            server.rests_until = time.monotonic() + min(FIRST_REST_S * 2 ** (server.failures - 1), LONGEST_REST_S)
            server.problem = str(error)

    def _client(self, url: str) -> SGLangClient:
        """A connection of this thread's own."""
        clients: dict[str, SGLangClient] = vars(self._of_thread)
        if url not in clients:
            clients[url] = SGLangClient(url, timeout_s=self._timeout_s)
        return clients[url]
