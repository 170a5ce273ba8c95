"""The plugin's own parts, without a server: registration, the background writer, its footprint."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from specforge_dspine.streaming import plugin
from specforge_dspine.streaming.plugin import RecordWriter, register
from specforge_dspine.streaming.protocol import CAPTURE_DIR_ENV, CAPTURE_LAYERS_ENV
from specforge_dspine.utils import versions as version
from tests.conftest import wait_for


def test_it_needs_torch_and_the_standard_library_only() -> None:
    code = "import sys, specforge_dspine.streaming.plugin\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"specforge", "transformers", "sglang", "requests", "pydantic"} & set(loaded)


@pytest.mark.parametrize("module", ["record", "process_guard"])
def test_what_runs_in_a_server_imports_without_a_trainer(module: str) -> None:
    code = f"import sys, specforge_dspine.streaming.{module}\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"specforge", "transformers", "specforge_dspine.training", "specforge_dspine.modeling"} & set(loaded)


def test_without_the_environment_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAPTURE_DIR_ENV, raising=False)
    monkeypatch.setitem(version.SUPPORTED, "sglang", "<0")  # not even looked at
    register()


@pytest.mark.parametrize(
    ("directory", "layers", "message"),
    [("relative", "1", "absolute"), ("/no/such/directory", "1", "existing"), (".", "1,x", "layer ids")],
)
def test_bad_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: str, layers: str, message: str
) -> None:
    monkeypatch.setenv(CAPTURE_DIR_ENV, str(tmp_path) if directory == "." else directory)
    monkeypatch.setenv(CAPTURE_LAYERS_ENV, layers)
    with pytest.raises(ValueError, match=message):
        register()


def test_an_unsupported_sglang_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CAPTURE_DIR_ENV, str(tmp_path))
    monkeypatch.setenv(CAPTURE_LAYERS_ENV, "1")
    monkeypatch.setitem(version.SUPPORTED, "sglang", ">=9,<10")
    with pytest.raises(RuntimeError, match=r"sglang.*is not supported.*sglang>=9,<10"):
        register()


def test_writer_publishes_whole_files(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    record = {"input_ids": torch.arange(6), "hidden_states": torch.randn(1, 6, 4)}
    assert writer.submit("a", record) == 6 * 8 + 6 * 4 * 4
    wait_for((tmp_path / "a.ckpt").exists)
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["hidden_states"], record["hidden_states"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_failed_write_is_reported_beside_the_record(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()  # a file cannot replace a directory
    RecordWriter(tmp_path).submit("a", {"input_ids": torch.arange(6)})
    wait_for((tmp_path / "a.error").exists)
    assert "IsADirectoryError" in json.loads((tmp_path / "a.error").read_text())["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "a.error"]


class SlowDisk(RecordWriter):
    """A writer whose disk takes nothing until it is told to."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.ready = threading.Event()

    def _write(self, name: str, record: Mapping[str, torch.Tensor], size: int) -> None:
        self.ready.wait(20)
        super()._write(name, record, size)


def test_a_slow_disk_holds_the_caller_back_instead_of_filling_memory(tmp_path: Path) -> None:
    record = {"input_ids": torch.arange(10)}  # 80 bytes
    writer = SlowDisk(tmp_path, max_bytes=200)
    passed = []

    def submit_four() -> None:
        for name in "abcd":
            writer.submit(name, record)
            passed.append(name)

    caller = threading.Thread(target=submit_four, daemon=True)
    caller.start()
    wait_for(lambda: passed == ["a", "b"])
    caller.join(0.3)
    assert passed == ["a", "b"], "the third would exceed 200 bytes"
    writer.ready.set()
    caller.join(20)
    wait_for(lambda: len(list(tmp_path.glob("*.ckpt"))) == 4)


def test_a_record_larger_than_the_limit_still_passes(tmp_path: Path) -> None:
    RecordWriter(tmp_path, max_bytes=10).submit("big", {"input_ids": torch.arange(100)})
    wait_for((tmp_path / "big.ckpt").exists)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": 2}, "protocol 2 is not understood.*speaks 1"),
        ({"name": "../a"}, "name = '../a'"),
        ({"loss_mask": [[0, 9]]}, "within 4 tokens"),
        ({"loss_mask": 3}, "not iterable"),
        ({"tokens": 5}, "computes 4 of 5 tokens"),
        ({"tokens": None}, "computes 4 of None tokens"),
    ],
)
def test_bad_requests_are_answered(change: dict[str, Any], message: str) -> None:
    request = {"protocol": 1, "name": "a", "tokens": 4, "loss_mask": [[1, 3]]}
    name, mask = plugin._parse(request, slice(10, 14), 0)
    assert (name, mask.tolist()) == ("a", [0, 1, 1, 0])
    with pytest.raises(plugin.CaptureRefused, match=message):
        plugin._parse(request | change, slice(10, 14), 0)
    with pytest.raises(plugin.CaptureRefused, match="3 came from the prefix cache"):
        plugin._parse(request, slice(10, 14), 3)
    with pytest.raises(plugin.CaptureRefused, match=r"lacks \['name'\]"):
        plugin._parse({key: value for key, value in request.items() if key != "name"}, slice(10, 14), 0)
