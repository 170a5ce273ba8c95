"""Training samples in which the served target answers every prompt itself.

    python -m data_prep.regenerate --target DIR --prompts train.jsonl --out samples.jsonl
        (--server URL .. | --managed cpu|0|0,1) [--max-new-tokens 64] [--thinking on|off|none] ...

A killed run is continued by the same command, a finished one is left as it is, and one with other inputs
is refused. ``answers`` holds what is done with a prompt, ``ledger`` what is kept of it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import requests
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from data_prep.answers import Regeneration, Settings, job_inputs, record_key
from data_prep.files import read_jsonl
from data_prep.ledger import Ledger
from specforge_dspine.stream.client import Completion, SGLangClient
from specforge_dspine.stream.server import ManagedServer, ServerFailed

THINKING = {"on": True, "off": False, "none": None}

CPU_CACHE_TOKENS = 32768
"""KV cache of a CPU server; when it is full, further requests wait."""

SECONDS_PER_TOKEN = 10.0
"""After this long for each new token of a batch, a server counts as hanging."""


def regenerate(options: argparse.Namespace) -> str:
    """Does what the command line says; returns a sentence about the result.

    Raises:
        ValueError: bad options, or files that belong to another job.
        ConnectionError: no server there.
        ServerFailed: a managed server did not start.
    """
    if not options.target.is_dir():
        raise ValueError(f"--target {options.target}: no such directory (download the target first)")
    config = AutoConfig.from_pretrained(options.target).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    settings = Settings(
        max_length=options.max_length or config.max_position_embeddings,
        dtype=_dtype(options, config),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        thinking=THINKING[options.thinking],
        batch=options.batch,
    )
    inputs = job_inputs(options.target, tokenizer, options.prompts, settings)
    ledger = Ledger(options.out, inputs, record_key)
    if options.overwrite:
        ledger.discard()
    if ledger.is_finished():
        return f"{options.out} is there already, made from these very inputs"
    with ledger:
        job = Regeneration(read_jsonl(options.prompts), tokenizer, settings, ledger)
        with _servers(options, settings) as urls, ExitStack() as stack:
            clients = [stack.enter_context(SGLangClient(url, timeout_s=_patience(settings))) for url in urls]
            skipped = job.run(SeveralServers(clients))
    for reason, number in skipped.most_common():
        print(f"skipped {number} turns: {reason}", file=sys.stderr)
    return f"{len(ledger.records) - skipped.total()} samples in {options.out}"


class SeveralServers:
    """Servers of one target, asked at the same time; answers come in the order of the prompts."""

    def __init__(self, clients: Sequence[SGLangClient]) -> None:
        self.clients = clients

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[Completion]:
        """As ``SGLangClient.generate``, each server taking every n-th prompt."""
        count = len(self.clients)
        shares = [prompts[k::count] for k in range(count)]
        answers: list[Completion] = [Completion([], "length")] * len(prompts)
        with ThreadPoolExecutor(count) as pool:
            asked = [
                pool.submit(client.generate, share, **options) if share else None
                for client, share in zip(self.clients, shares, strict=True)
            ]
            for k, future in enumerate(asked):
                if future is not None:
                    answers[k::count] = future.result()
        return answers


def _patience(settings: Settings) -> float:
    return 600.0 + SECONDS_PER_TOKEN * settings.max_new_tokens


def _dtype(options: argparse.Namespace, config: PretrainedConfig) -> str:
    """The dtype that answers: a running server's own, otherwise the one asked for."""
    if options.server is None:
        dtype = options.dtype or str(config.dtype).removeprefix("torch.")
        if dtype == "None":
            raise ValueError(f"--dtype: {options.target}/config.json names no dtype, so give one")
        return dtype
    dtypes = {_served_dtype(url, options) for url in options.server}
    if len(dtypes) > 1:
        raise ValueError(f"--server: the servers compute in {' and '.join(sorted(dtypes))}; answers would differ")
    return dtypes.pop()


def _served_dtype(url: str, options: argparse.Namespace) -> str:
    """The dtype of a running server, which must serve ``--target``."""
    served = _served(url)
    path = Path(served["model_path"])
    if str(path) != str(options.target) and path.resolve() != options.target.resolve():
        raise ValueError(f"--server {url} serves {path}, not --target {options.target}")
    if options.dtype not in (None, served["dtype"]):
        raise ValueError(f"--server {url} computes in {served['dtype']}, not in {options.dtype}")
    return str(served["dtype"])


def _served(url: str) -> dict[str, Any]:
    """The arguments that a running server was started with."""
    with requests.Session() as session:
        session.trust_env = False  # as SGLangClient does
        try:
            response = session.get(f"{url.rstrip('/')}/server_info", timeout=60)
            response.raise_for_status()
            return response.json()
        except requests.RequestException as error:
            raise ConnectionError(f"--server {url} does not answer ({error}); is an SGLang server there?") from error


@contextmanager
def _servers(options: argparse.Namespace, settings: Settings) -> Iterator[list[str]]:
    """The URLs to send to; a server of our own lives as long as the context."""
    if options.server is not None:
        yield options.server
        return
    devices = [] if options.managed == "cpu" else [int(k) for k in options.managed.split(",")]
    cache = None if devices else min(options.batch * settings.max_length, CPU_CACHE_TOKENS)
    with ManagedServer(
        str(options.target),
        options.out.with_name(options.out.name + ".server"),
        layers=[0],  # nothing is captured here, but the server's plugin wants to know what it could
        dtype=settings.dtype,
        devices=devices,
        max_running_requests=settings.batch,
        max_total_tokens=cache,
    ) as server:
        yield [server.url]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.regenerate",
        description="Answer prompts by the target itself and write training samples.",
    )
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--prompts", type=Path, required=True, help="from data_prep.prompts")
    parser.add_argument("--out", type=Path, required=True, help="the training file (.jsonl) to make")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL", nargs="+", help="running SGLang servers of the target")
    where.add_argument("--managed", metavar="cpu|0|0,1", help="start one, on the CPU or on these GPUs")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the target's")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer (default 64)")
    parser.add_argument("--max-length", type=int, help="prompt + answer (default: the target's context)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0, greedy")
    parser.add_argument("--thinking", choices=sorted(THINKING), default="none", help="the template's switch")
    parser.add_argument("--batch", type=int, default=32, help="prompts sent together (default 32)")
    parser.add_argument("--overwrite", action="store_true", help="start anew, whatever --out holds")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        print(regenerate(options))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")
    except (ValueError, ConnectionError, ServerFailed) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
