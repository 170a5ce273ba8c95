"""Unsupported versions of the hosts: refused before they are imported, naming the versions that work."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from specforge_dspine.utils import versions
from specforge_dspine.utils.versions import SUPPORTED, VERSION, installed, require

WINDOWS = {"specforge": ">=0.2,<0.3", "sglang": ">=0.5.14,<0.6"}


@pytest.mark.parametrize("distribution", WINDOWS)
def test_the_installed_versions_are_supported(distribution: str) -> None:
    assert require(distribution) == installed(distribution)
    assert SUPPORTED[distribution] == WINDOWS[distribution]


@pytest.mark.parametrize(
    ("distribution", "found", "supported"),
    [
        ("specforge", "0.2.0", True),
        ("specforge", "0.2.7", True),
        ("specforge", "0.1.9", False),
        ("specforge", "0.3.0", False),
        ("sglang", "0.5.14", True),
        ("sglang", "0.5.23.post1", True),
        ("sglang", "0.5.15.dev3+gabc", True),
        ("sglang", "0.5.13", False),
        ("sglang", "0.6.0", False),
    ],
)
def test_versions_outside_the_window_are_refused(
    distribution: str, found: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    if supported:
        assert require(distribution) == found
        return
    window = WINDOWS[distribution]
    with pytest.raises(RuntimeError) as caught:
        require(distribution)
    assert str(caught.value) == (
        f"{distribution} {found} is not supported: specforge-dspine {VERSION} works with {distribution}{window}; "
        f'pip install "{distribution}{window}"'
    )


def test_a_missing_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    assert installed("sglang") is None
    with pytest.raises(RuntimeError, match=r'sglang is not installed: .* pip install "sglang>=0\.5\.14,<0\.6"'):
        require("sglang")


FAKED = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.3.1" if name == "specforge" else real(name)
import specforge_dspine.{module}
"""


@pytest.mark.parametrize("module", ["training.specforge_algorithm", "train"])
def test_an_unsupported_specforge_is_refused_before_it_is_imported(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", FAKED.format(module=module)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert said[-1] == (
        "specforge_dspine.utils.errors.RunError: specforge 0.3.1 is not supported: "
        f"specforge-dspine {VERSION} works with specforge>=0.2,<0.3; "
        'pip install "specforge>=0.2,<0.3"'
    )
    assert not any(line.split("|")[-1].strip() == "specforge" for line in done.stderr.splitlines())


@pytest.mark.parametrize("module", ["streaming.plugin", "cli"])
def test_what_needs_no_specforge_loads_beside_an_unsupported_one(module: str) -> None:
    """A server's environment may have another SpecForge, and ``--version`` has to tell which one."""
    done = subprocess.run(
        [sys.executable, "-c", FAKED.format(module=module)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_console_script_refuses_an_unsupported_specforge_in_a_line() -> None:
    script = FAKED.format(module="cli") + "raise SystemExit(specforge_dspine.cli.main(['train', '--help']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: specforge 0.3.1 is not supported") and len(done.stderr.splitlines()) == 1


def test_the_plugin_needs_no_specforge() -> None:
    """It runs inside a server, which may have its own environment."""
    script = """
import importlib.metadata, sys
real = importlib.metadata.version
def without(name):
    if name == "specforge":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = without
sys.modules["specforge"] = None
import specforge_dspine.streaming.plugin
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
