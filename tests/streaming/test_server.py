"""Servers as processes: command lines, failing to start, ending with their owner; and unusual ways to serve."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests
import torch

from specforge_dspine import capture as capture_command
from specforge_dspine.streaming import process_guard
from specforge_dspine.streaming.client import SGLangClient
from specforge_dspine.streaming.protocol import CAPTURE_KEY
from specforge_dspine.streaming.record import RecordError, Sample, TargetIdentity
from specforge_dspine.streaming.server import ManagedServer, ManagedServerError, ServerOptions, free_port
from specforge_dspine.streaming.server import main as serve_main
from tests.conftest import wait_for
from tests.support import ROOT
from tests.support.targets import HIDDEN, VOCAB, build_qwen3

POISON = VOCAB - 1  # a token whose states are NaN


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and everything it started, directly or not."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs; one that waits to be reaped by somebody counts as gone."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(runs(process) for process in processes)


# ---- command lines ----------------------------------------------------------------------------------


def parsed(server: ManagedServer) -> argparse.Namespace:
    """The server's flags as the installed SGLang understands them."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert server.command[1:3] == ["-m", "sglang.launch_server"]
    return parser.parse_args(server.command[3:])


def test_cpu_command(tmp_path: Path) -> None:
    server = ManagedServer("/models/t", tmp_path, [1, 9], dtype="float32", max_total_tokens=4096)
    flags = parsed(server)
    assert (flags.model_path, flags.port, flags.dtype, flags.device) == ("/models/t", server.port, "float32", "cpu")
    assert (flags.max_total_tokens, flags.max_running_requests, flags.tp_size) == (4096, 8, 1)
    assert flags.mem_fraction_static >= 0.5, "a job that takes 10 % of the memory meanwhile must not stop the server"
    assert flags.disable_radix_cache
    assert flags.chunked_prefill_size == -1
    assert server.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert server.environment["SPECFORGE_DSPINE_CAPTURE_DIR"] == str(tmp_path / "spool")
    assert server.environment["SPECFORGE_DSPINE_CAPTURE_LAYERS"] == "1,9"


def test_gpu_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    extra = ["--mem-fraction-static", "0.7"]
    server = ManagedServer("/models/t", tmp_path, [1], devices=[2, 3], extra_args=extra)
    flags = parsed(server)
    assert (flags.dtype, flags.tp_size, flags.device, flags.mem_fraction_static) == ("bfloat16", 2, None, 0.7)
    assert flags.disable_radix_cache
    assert flags.chunked_prefill_size == -1
    assert flags.disable_prefill_cuda_graph
    assert flags.enforce_disable_flashinfer_allreduce_fusion
    assert not flags.disable_decode_cuda_graph
    assert server.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_USE_CPU_ENGINE" not in server.environment


def test_devices_count_within_what_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    server = ManagedServer("/models/t", tmp_path, [1], devices=[0, 2])
    assert server.environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    with pytest.raises(ValueError, match=r"devices = \[3\]: CUDA_VISIBLE_DEVICES = 4,5,6"):
        ManagedServer("/models/t", tmp_path, [1], devices=[3])


@pytest.mark.parametrize("flag", ["--port", "--dtype=float16", "--model-path"])
def test_flags_with_an_option_of_their_own_are_refused(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ValueError, match=f"extra_args holds {flag}"):
        ManagedServer("/models/t", tmp_path, [1], extra_args=[flag, "1"])


def test_ports_differ_and_are_outside_of_the_ephemeral_range() -> None:
    ports = {free_port() for _ in range(8)}
    assert len(ports) > 1
    assert all(20000 <= port < 32768 for port in ports)


# ---- the guard --------------------------------------------------------------------------------------

STUBBORN = "trap '' TERM; sleep 1000 & sleep 1000 & while true; do sleep 0.1; done"
OWNER = """
import subprocess, sys, time, os
subprocess.Popen([sys.executable, "-m", "specforge_dspine.streaming.process_guard", str(os.getpid()), "--",
                  "sh", "-c", sys.argv[1]], start_new_session=True)
time.sleep(1000)
"""


@pytest.fixture
def owned() -> Iterator[list[psutil.Process]]:
    """An owner, its guard, and a server that ignores SIGTERM and has children: [owner, guard, sh, sleeps]."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, STUBBORN])
    wait_for(lambda: len(family(owner)) >= 5)
    processes = family(owner)
    yield processes
    for process in processes:
        if process.is_running():
            process.kill()
    owner.wait()


def test_a_killed_owner_takes_the_server_with_it(owned: list[psutil.Process]) -> None:
    owned[0].kill()
    wait_for(lambda: gone(owned), seconds=10)


def test_a_killed_guard_takes_the_server_with_it(owned: list[psutil.Process]) -> None:
    owned[1].kill()
    wait_for(lambda: gone([owned[2]]), seconds=10)


def test_a_guard_that_is_asked_ends_the_whole_group(owned: list[psutil.Process]) -> None:
    owned[1].terminate()
    wait_for(lambda: gone(owned[1:]), seconds=10)
    assert not gone([owned[0]])


def test_the_guard_passes_the_exit_status_on() -> None:
    command = [sys.executable, "-m", process_guard.__name__, str(os.getpid()), "--", "sh", "-c", "exit 7"]
    assert subprocess.run(command, timeout=30).returncode == 7


def test_a_guard_whose_owner_is_gone_already_ends_at_once() -> None:
    command = [sys.executable, "-m", process_guard.__name__, "1", "--", "sleep", "1000"]
    assert subprocess.run(command, timeout=30).returncode == -signal.SIGTERM % 256


# ---- options ----------------------------------------------------------------------------------------

SERVE = [sys.executable, "-m", "specforge_dspine.streaming.server"]


def test_options_of_a_server_by_hand() -> None:
    given = {"model": "m", "layers": "1,9", "dir": "d"}
    assert ServerOptions.model_validate(given).device == ()
    options = ServerOptions.model_validate(given | {"device": "0,1", "port": "30000"})
    assert (options.layers, options.device, options.port, options.dtype) == ((1, 9), (0, 1), 30000, "bfloat16")


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (serve_main, ["--device", "gpu"], "--device gpu: "),
        (serve_main, ["--device", "-1"], "--device"),
        (serve_main, ["--layers", "1-9"], "--layers 1-9: give ids separated by commas, as in 1,9,17"),
        (serve_main, ["--model", "cache/none/x"], "cache/none/x: no such folder (looked in /"),
        (serve_main, ["--port", "70000"], "--port 70000: input should be less than or equal to 65535"),
        (serve_main, ["--startup-timeout", "0"], "--startup-timeout 0: input should be greater than 0"),
        (serve_main, ["--dtype", "int8"], "invalid choice: 'int8'"),
        (capture_command.main, ["--batch", "0"], "--batch 0: input should be greater than or equal to 1"),
        (capture_command.main, ["--max-length", "0"], "--max-length 0: input should be"),
        (capture_command.main, ["--max-dropped", "-1"], "--max-dropped"),
        (
            capture_command.main,
            ["--target", "Qwen"],
            f"no such file or folder (looked in {Path('Qwen').absolute()}",
        ),
        (capture_command.main, ["--samples", "/none"], "--samples /none: no such file or folder"),
        (capture_command.main, ["--server", "http://x", "--device", "0"], "at most one of --server and --device"),
    ],
)
def test_options_out_of_range_are_refused(
    main: Callable[[list[str]], int], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = "--model m --dir d" if main is serve_main else f"--target {ROOT} --samples {ROOT} --out o"
    with pytest.raises(SystemExit) as caught:
        main([*needed.split(), "--layers", "1", *words])
    assert caught.value.code == 2 and said in capsys.readouterr().err


# ---- real servers -----------------------------------------------------------------------------------


# What a worker of torchrun finds in its environment; a server that inherits it waits for ever.
TORCHRUN = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen3(tmp_path_factory.mktemp("poisoned"), poisoned_token=POISON)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, POISON, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.server
def test_a_server_that_does_not_start_shows_its_log(poisoned: Path, tmp_path: Path) -> None:
    server = ManagedServer(str(poisoned), tmp_path, [1], dtype="float32", extra_args=["--no-such-flag"])
    with pytest.raises(ManagedServerError, match="ended while starting") as caught:
        server.start()
    assert "unrecognized arguments: --no-such-flag" in str(caught.value)
    assert "sglang.launch_server" in str(caught.value)
    assert not server.alive()
    server.stop()


@pytest.mark.server
def test_prefix_cache_and_chunks_give_errors_and_nan_is_dropped(
    poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server whose owner left the cache and chunked prefill on: full record or an error, never a short one."""
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    identity = TargetIdentity.from_config(str(poisoned), [0, 3], "float32")
    server = ManagedServer(str(poisoned), tmp_path, [0, 3], dtype="float32")
    server.command.remove("--disable-radix-cache")
    server.command[server.command.index("--chunked-prefill-size") + 1] = "64"
    server.command.append("--enable-return-hidden-states")

    def ask(name: str, ids: list[int], **more: object) -> dict[str, object]:
        custom = {CAPTURE_KEY: {"protocol": 1, "name": name, "tokens": len(ids), "loss_mask": []}}
        sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": custom}
        body = {"input_ids": ids, "sampling_params": sampling, **more}
        return requests.post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"]

    with server, SGLangClient(server.url, timeout_s=60) as client:
        shared = prompt(40, 1)
        assert ask("first", shared)[CAPTURE_KEY][0]["file"] == "first"
        wait_for((server.spool / "first.ckpt").is_file)
        (server.spool / "first.ckpt").unlink()
        response = ask("second", [*shared, 5])
        assert response["cached_tokens"] > 0
        assert "came from the prefix cache" in response[CAPTURE_KEY][0]["error"]

        # The client's requests have a cache key of their own, so the same prompt is computed again.
        results = [client.capture([Sample("again", shared, [1] * 40)], identity)[0] for _ in range(2)]
        assert all(isinstance(result, Path) for result in results)
        for result in results:
            assert isinstance(result, Path)
            result.unlink()

        [chunked] = client.capture([Sample("chunked", prompt(100, 2), [1] * 100)], identity)
        assert isinstance(chunked, RecordError)
        assert "of 100 tokens" in chunked.reason
        assert "--chunked-prefill-size -1" in chunked.reason

        good = prompt(20, 3)
        bad = [*good[:7], POISON, *good[8:]]
        first, second, third = client.capture(
            [Sample("a", good, [1] * 20), Sample("b", bad, [1] * 20), Sample("c", good, [1] * 20)], identity
        )
        assert isinstance(second, RecordError)
        # Token 0, though 7 is the poisoned one: masked attention weights are zeros, and 0 · NaN is NaN.
        assert (second.name, second.reason) == ("b", "hidden_states is nan at token 0, channel 0")
        for result in (first, third):
            assert isinstance(result, Path)
            result.unlink()

        # Taps do not replace the hidden states that the server returns to others.
        states = ask("states", prompt(9, 4), return_hidden_states=True)["hidden_states"]
        assert torch.tensor(states[0]).shape == (9, HIDDEN)
        wait_for((server.spool / "states.ckpt").is_file)
        ours = torch.load(server.spool / "states.ckpt")["target_last_hidden_states"][0]
        torch.testing.assert_close(torch.tensor(states[0]), ours, atol=1e-4, rtol=0)
        assert [path.name for path in server.spool.iterdir()] == ["states.ckpt"]


@pytest.mark.server
def test_a_server_by_hand_serves_the_capture_command_and_dies_with_its_owner(poisoned: Path, tmp_path: Path) -> None:
    command = [*SERVE, "--model", str(poisoned), "--dtype", "float32"]
    command += ["--layers", "1,4", "--dir", str(tmp_path / "served"), "--", "--max-prefill-tokens", "2048"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        line = owner.stdout.readline().decode()
        url = line.split(" at ")[1].split(";")[0]
        samples = tmp_path / "samples.jsonl"
        lines = [{"input_ids": prompt(12, k), "loss_mask": [0] * 6 + [1] * 6} for k in range(5)]
        lines[3]["input_ids"][8] = POISON
        samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = ["--target", str(poisoned), "--samples", str(samples), "--layers", "1,4", "--dtype", "float32"]
        options += ["--out", str(tmp_path / "features"), "--server", url, "--batch", "2"]
        assert capture_command.main(options) == 0
        manifest = json.loads((tmp_path / "features/manifest.json").read_text())
        assert manifest["count"] == 4
        assert "hidden_states is nan" in manifest["dropped"][0]["reason"]
        assert not list((tmp_path / "served/spool").iterdir())

        processes = family(owner)
        assert any("sglang" in process.name() for process in processes)
        owner.kill()
        started = time.monotonic()
        wait_for(lambda: gone(processes), seconds=10)
        print(f"gone after {time.monotonic() - started:.1f} s")
        with pytest.raises(ConnectionError, match="no answer from"):
            SGLangClient(url).generate([[5]], max_new_tokens=1)
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.server
def test_capture_command_with_its_own_server_but_without_a_plugin(poisoned: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"input_ids": prompt(12, 1), "loss_mask": [1] * 12}) + "\n")
    command = [sys.executable, "-m", "specforge_dspine.capture", "--target", str(poisoned), "--dtype", "float32"]
    command += ["--samples", str(samples), "--layers", "1,4", "--out", str(tmp_path / "out"), "--device", "cpu"]
    environment = os.environ | {"SGLANG_PLUGINS": "none-of-ours"}  # as if ours were not installed there
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "the plugin did not answer. Is specforge-dspine" in done.stderr
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False
    assert not (tmp_path / "out/.server/spool").exists()


@pytest.mark.server
def test_sigterm_while_starting_ends_everything(poisoned: Path, tmp_path: Path) -> None:
    command = [*SERVE, "--model", str(poisoned), "--dtype", "float32"]
    owner = subprocess.Popen([*command, "--layers", "1,4", "--dir", str(tmp_path)])
    wait_for(lambda: len(family(owner)) >= 3, seconds=60)
    processes = family(owner)
    owner.terminate()
    assert owner.wait(20) == 128 + signal.SIGTERM
    wait_for(lambda: gone(processes), seconds=5)
