"""SGLang server with capture enabled: owned by a run, or served in the foreground.

``ManagedServer`` picks a free port, starts ``sglang.launch_server`` behind a guard process (``process_guard``), waits
for ``/health``, and ends it. On the CPU the flags are those under which an unmodified SGLang 0.5.14 serves without a
GPU. On GPUs, defaults are switched off that would cost records: the prefix cache and chunked prefill split a sequence
over several forwards, CUDA graphs for prefill bypass the Python hook, and fused all-reduce leaves partial sums in the
tapped states. The GPU flags have not been run.

By hand, for a recipe that names ``stream.servers``; flags after -- go to sglang.launch_server::

    python -m specforge_dspine.streaming.server --model DIR --layers 1,9,17 --dir DIR [--device cpu|0|0,1]
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import requests
from pydantic import AfterValidator, BeforeValidator, NonNegativeInt
from tqdm import tqdm

from specforge_dspine.streaming import process_guard
from specforge_dspine.streaming.protocol import CAPTURE_DIR_ENV, CAPTURE_LAYERS_ENV
from specforge_dspine.streaming.record import TargetIdentity
from specforge_dspine.utils.cli import Command, IdList, Options, option, parse_ids, run_command
from specforge_dspine.utils.errors import RunError
from specforge_dspine.utils.files import check_model_path
from specforge_dspine.utils.versions import require

logger = logging.getLogger(__name__)

LOG_TAIL = 30
"""Lines of the server's log that an exception shows."""

OWN_FLAGS = ("--model-path", "--model", "--host", "--port", "--device", "--dtype", "--tp-size", "--tp")
"""Flags that ``ManagedServer`` sets from its own arguments and refuses among the extra ones."""

CAPTURE_FLAGS = ["--disable-radix-cache", "--chunked-prefill-size", "-1", "--disable-prefill-cuda-graph"]
# Nobody reads text here: ids go in and come out, so no tokenizer is needed either.
COMMON_FLAGS = ["--host", "127.0.0.1", "--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
CPU_FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-decode-cuda-graph"),
    # Memory that other processes take while the weights load counts against it; the cache has its own bound.
    *("--mem-fraction-static", "0.8"),
]
GPU_FLAGS = ["--enforce-disable-flashinfer-allreduce-fusion"]

# What torchrun tells its workers would send the server's own process group to torchrun's store.
LAUNCHER_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+)"
)


def parse_devices(text: Any) -> Any:
    """``"cpu"`` → ``()``, ``"0,1"`` → ``(0, 1)``; other values as they are."""
    return () if text == "cpu" else parse_ids(text)


Devices = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(parse_devices)]
Dtype = Literal["float32", "bfloat16", "float16"]


class ManagedServerError(RunError):
    """The server did not come up or is gone; the message holds the end of its log."""


class ManagedServer:
    """One SGLang server that belongs to this process and ends with it, whatever ends it.

    Args:
        run_dir: gets ``server.log`` and ``spool/``, where records appear. The spool is emptied at the start and
            removed when the context is left; ``stop`` alone leaves it, for records that are still being read.
        layers: ids of the T tapped layers.
        devices: CUDA ordinals as this process counts them; none for the CPU.
        tp_size: tensor-parallel size; by default the number of devices.
        extra_args: further flags of ``sglang.launch_server``.
        max_total_tokens: tokens of KV cache; by default 8192 on the CPU and SGLang's own choice on GPUs.
        max_running_requests: by default 8 on the CPU and SGLang's own choice on GPUs.

    Raises:
        ValueError: an extra flag that is set from the arguments above.
        RunError: an SGLang outside of the supported window.
        ManagedServerError: from ``start``, when the server ends or the time is over.
    """

    def __init__(
        self,
        model_path: str,
        run_dir: Path,
        layers: Sequence[int],
        *,
        dtype: str = "bfloat16",
        devices: Sequence[int] = (),
        tp_size: int | None = None,
        extra_args: Sequence[str] = (),
        startup_timeout_s: float = 600.0,
        max_total_tokens: int | None = None,
        max_running_requests: int | None = None,
        port: int | None = None,
    ) -> None:
        require("sglang")
        for flag in extra_args:
            if flag.split("=")[0] in OWN_FLAGS:
                raise ValueError(f"extra_args holds {flag}: set it with the server's own option instead")
        self.log_path = Path(run_dir).resolve() / "server.log"
        self.spool = Path(run_dir).resolve() / "spool"
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._timeout_s = startup_timeout_s
        limits = {
            "--tp-size": tp_size or len(devices) or 1,
            "--max-total-tokens": max_total_tokens or (None if devices else 8192),
            "--max-running-requests": max_running_requests or (None if devices else 8),
        }
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model_path), "--port", str(self.port), "--dtype", dtype),
            *(text for flag, value in limits.items() if value for text in (flag, str(value))),
            *COMMON_FLAGS,
            *CAPTURE_FLAGS,
            *(GPU_FLAGS if devices else CPU_FLAGS),
            *extra_args,
        ]
        self.environment = {
            CAPTURE_DIR_ENV: str(self.spool),
            CAPTURE_LAYERS_ENV: ",".join(str(k) for k in layers),
            **(_visible(devices, os.environ) if devices else {"SGLANG_USE_CPU_ENGINE": "1"}),
            # More threads than one make a CPU server many times slower as soon as anything else runs.
            **({} if devices else {"OMP_NUM_THREADS": "1"}),
            **({"HF_HUB_OFFLINE": "1"} if Path(model_path).is_dir() else {}),
        }
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; return once it is healthy."""
        shutil.rmtree(self.spool, ignore_errors=True)
        self.spool.mkdir(parents=True)
        inherited = {key: value for key, value in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(key)}
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", process_guard.__name__, str(os.getpid()), "--", *self.command],
                env=inherited | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal reaches the run alone, which then ends its server in order.
                start_new_session=True,
            )
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise

    def _await_health(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        text = f"starting SGLang at {self.url}, log in {self.log_path}"
        logger.info(text)
        # disable=None: the clock runs on a terminal only
        with (
            requests.Session() as session,
            tqdm(desc=text, bar_format="{desc} [{elapsed}]", disable=None, leave=False) as bar,
        ):
            session.trust_env = False  # a proxy from the environment must not see loopback requests
            while time.monotonic() < deadline:
                bar.refresh()
                if not self.alive():
                    raise ManagedServerError(self._failure("ended while starting"))
                try:
                    if session.get(f"{self.url}/health", timeout=30).ok:
                        return
                except requests.RequestException:
                    pass  # not listening yet
                time.sleep(0.5)
        raise ManagedServerError(self._failure(f"was not healthy after {self._timeout_s:.0f} s"))

    def _failure(self, what: str) -> str:
        with self.log_path.open(errors="replace") as log:
            tail = "".join(deque(log, LOG_TAIL)).rstrip()
        return (
            f"the SGLang server {what}. The end of {self.log_path}:\n{tail}\n"
            f"It was started with: {' '.join(self.command)}\n"
            "Correct what the log complains about (model path, memory, devices, extra flags), or give it "
            "more time with a longer start-up timeout, and start again."
        )

    def alive(self) -> bool:
        """Does the server's process run? It may still be starting."""
        return self._guard is not None and self._guard.poll() is None

    def check(self) -> None:
        """Raise ``ManagedServerError``, with the end of the log, if the server is gone."""
        if not self.alive():
            raise ManagedServerError(self._failure("is gone"))

    def stop(self) -> None:
        """End the server and all of its processes; safe to call again."""
        if self._guard is None:
            return
        self._guard.terminate()
        try:
            self._guard.wait(process_guard.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the kernel then kills the server
            self._guard.wait()

    def __enter__(self) -> ManagedServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.spool, ignore_errors=True)


def free_port() -> int:
    """Return a port that nobody uses, below the range from which Linux takes ports for outgoing connections.

    SGLang binds it only after the model is loaded; until then an ephemeral port could be taken.
    """
    for port in random.SystemRandom().sample(range(20000, 32768), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of 200 ports between 20000 and 32767 is free on this machine")


def _visible(devices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for ``devices``, which count within what this process sees itself."""
    outer = environment.get("CUDA_VISIBLE_DEVICES")
    visible = [str(k) for k in range(max(devices) + 1)] if outer is None else outer.split(",")
    if max(devices) >= len(visible):
        raise ValueError(f"devices = {list(devices)}: CUDA_VISIBLE_DEVICES = {outer} offers {len(visible)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[k] for k in devices)}


class ServerOptions(Options):
    """What is served, and how."""

    model: Annotated[str, AfterValidator(check_model_path)] = option("target model directory")
    layers: IdList = option("tapped layer ids, as in 1,9,17")
    dir: Path = option("gets server.log and spool/ (the records)")
    device: Devices = option("cpu (default), or CUDA ordinals as in 0 or 0,1", default=())
    dtype: Dtype = option("of the target and the records", default="bfloat16")
    port: int | None = option("default: a free one", default=None, ge=1, le=65535)
    startup_timeout: float = option("until the server must be healthy", default=600.0, gt=0, metavar="SECONDS")
    extra: tuple[str, ...] = option("further flags of sglang.launch_server, after --", default=(), positional=True)


def serve(options: ServerOptions) -> None:
    """Serve in the foreground until Ctrl-C, SIGTERM, or the server's own end."""
    TargetIdentity.from_config(options.model, options.layers, options.dtype)  # refuses bad ids at once
    server = ManagedServer(
        options.model,
        options.dir,
        options.layers,
        dtype=options.dtype,
        devices=options.device,
        extra_args=options.extra,
        startup_timeout_s=options.startup_timeout,
        port=options.port,
    )
    with server:
        print(f"serving {options.model} at {server.url}; records appear in {server.spool}", flush=True)
        print(f"use it with stream.managed=null stream.servers=[{server.url}]; Ctrl-C ends it", flush=True)
        while True:
            server.check()
            time.sleep(1)


main = partial(
    run_command,
    Command(ServerOptions, serve),
    module="specforge_dspine.streaming.server",
    doc=__doc__,
    advice="the server has ended",
)

if __name__ == "__main__":
    raise SystemExit(main())
