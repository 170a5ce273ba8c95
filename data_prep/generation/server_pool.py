"""The servers that answer: shown to serve the target, shared by many threads, and replaced by each other.

A server that fails rests, twice as long each time, and is looked at again before it gets the next request: whatever
was started there in the meantime must be the same target. Requests go to the others until then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from specforge_dspine.streaming.client import Completion, SGLangClient

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""How long a failed server is left alone: the first time, and at most."""

ATTEMPTS = 5
"""So often a request is sent to servers that work; then the failure is its own."""

HOPELESS = 8
"""So many requests in a row that all attempts failed on are no longer the requests' fault."""

FACTS_TIMEOUT_S = 60.0


class WrongServer(ValueError):
    """A server that answers, but not as the target would; the message says what differs and what to do."""


class RequestFailed(RuntimeError):
    """Servers that answer other requests failed on this one again and again."""


@dataclass(frozen=True)
class Expected:
    """What every server must say of itself.

    Attributes:
        model: the path or name under which it serves the target.
        dtype: None for whatever it is; all must be the same.
        deterministic: whether it must draw by the seed of a request.
    """

    model: str
    dtype: str | None = None
    deterministic: bool = False


@dataclass
class _Server:
    url: str
    busy: int = 0
    failures: int = 0
    rests_until: float = 0.0
    problem: str = ""


def served(url: str, expected: Expected) -> str:
    """The dtype of a running server, after a look at what it serves.

    Raises:
        WrongServer: it serves something else, or in another way.
        ConnectionError: nobody answers.
    """
    facts = _facts(url)
    found = str(facts["model_path"])
    if found != expected.model and Path(found).resolve() != Path(expected.model).resolve():
        raise WrongServer(
            f"--server {url} serves {found}, not {expected.model}: start it with this target, or say with "
            "--served-as that the target has that name there"
        )
    dtype = str(facts["dtype"])
    if expected.dtype not in (None, dtype):
        raise WrongServer(f"--server {url} computes in {dtype}, not in {expected.dtype}; answers would differ")
    if expected.deterministic and not facts.get("enable_deterministic_inference"):
        raise WrongServer(
            f"--server {url} ignores seeds: start it with --enable-deterministic-inference (which SGLang offers on "
            "GPUs), or leave --seed out, and draws differ from run to run"
        )
    return dtype


def _facts(url: str) -> dict[str, Any]:
    """The arguments that a running server was started with."""
    with requests.Session() as session:
        session.trust_env = False  # as SGLangClient does
        try:
            response = session.get(f"{url.rstrip('/')}/server_info", timeout=FACTS_TIMEOUT_S)
            response.raise_for_status()
            return response.json()
        except (requests.RequestException, ValueError) as error:
            raise ConnectionError(f"--server {url} does not answer ({error}); is an SGLang server there?") from error


@dataclass
class Servers:
    """Servers of one target, for any number of threads.

    Args:
        urls: where they are; ``expected`` is what they were found to be.
        timeout_s: seconds after which a request counts as lost.
        patience_s: seconds after the failure of the last working server after which nobody waits any longer.
    """

    urls: Sequence[str]
    expected: Expected
    timeout_s: float
    patience_s: float
    _servers: list[_Server] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _own: threading.local = field(default_factory=threading.local, init=False)
    _lost_since: float | None = field(default=None, init=False)  # when the last one that worked failed
    _given_up: int = field(default=0, init=False)  # requests in a row

    def __post_init__(self) -> None:
        self._servers = [_Server(url) for url in self.urls]

    def generate(self, prompt: list[int], **options: Any) -> Completion:
        """As ``SGLangClient.generate``, for one prompt.

        Raises:
            RequestRefused: a server refused the prompt.
            RequestFailed: servers that work failed on it.
            WrongServer: another target is behind a URL now.
            ConnectionError: no server has worked for ``patience_s``, or for :data:`HOPELESS` requests.
        """
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            server = self._take()
            try:
                (answer,) = self._client(server.url).generate([prompt], **options)
            except ConnectionError as error:
                problem = error
                self._failed(server, error)
            else:
                with self._lock:
                    self._lost_since, self._given_up = None, 0
                return answer
            finally:
                with self._lock:
                    server.busy -= 1
        with self._lock:
            self._given_up += 1
            if self._given_up >= HOPELESS:
                raise ConnectionError(
                    f"the servers say that they run, but failed on {HOPELESS} requests in a row, {ATTEMPTS} times on "
                    f"each ({problem}); look at their logs, and the same command continues"
                )
        raise RequestFailed(f"{ATTEMPTS} attempts, the last: {problem}")

    def _take(self) -> _Server:
        """The least busy server that works, perhaps after a rest."""
        while True:
            with self._lock:
                now = time.monotonic()
                ready = [server for server in self._servers if server.rests_until <= now]
                if ready:
                    server = min(ready, key=lambda each: each.busy)
                    server.busy += 1
                    if not server.failures:
                        return server
                    server.rests_until = now + LONGEST_REST_S  # one thread looks, the others wait
                elif self._lost_since is not None and now - self._lost_since > self.patience_s:
                    problems = "; ".join(server.problem for server in self._servers)
                    raise ConnectionError(
                        f"no server has answered for {self.patience_s:.0f} s ({problems}). Start one again; the same "
                        "command continues"
                    )
            if ready and self._works_again(server):
                return server
            time.sleep(0.1)

    def _works_again(self, server: _Server) -> bool:
        try:
            served(server.url, self.expected)
        except ConnectionError as error:
            self._failed(server, error)
            with self._lock:
                server.busy -= 1
            return False
        with self._lock:
            server.failures, server.rests_until = 0, 0.0
            self._lost_since = None
        return True

    def _failed(self, server: _Server, error: Exception) -> None:
        with self._lock:
            if server.failures == 0:
                tqdm.write(f"{server.url} failed and rests: {error}")
            server.failures += 1
            if self._lost_since is None and all(each.failures for each in self._servers):
                self._lost_since = time.monotonic()
            rest = min(FIRST_REST_S * 2 ** (server.failures - 1), LONGEST_REST_S)
            server.rests_until = time.monotonic() + rest
            server.problem = str(error)

    def _client(self, url: str) -> SGLangClient:
        """A connection of this thread's own."""
        clients: dict[str, SGLangClient] = self._own.__dict__.setdefault("clients", {})
        if url not in clients:
            clients[url] = SGLangClient(url, timeout_s=self.timeout_s)
        return clients[url]
