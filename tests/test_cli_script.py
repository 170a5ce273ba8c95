"""The console script: help, version, hints, and commands that keep their output and exit status."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tomllib

import pytest

from specforge_dspine.cli import COMMANDS, main
from specforge_dspine.utils.versions import VERSION
from tests.support import ROOT

NO_VECTORS = "tests/golden/missing.safetensors"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specforge_dspine.cli", *words], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def test_the_installed_script_is_this_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["specforge-dspine"].split(":")
    assert getattr(importlib.import_module(module), function) is main


def test_every_command_is_a_module_with_a_description() -> None:
    shown = run("--help")
    assert shown.returncode == 0 and shown.stderr == ""
    for name, (module, description) in COMMANDS.items():
        assert importlib.util.find_spec(f"specforge_dspine.{module}"), name
        assert f"  {name:15}{description}\n" in shown.stdout


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["traine"]])
def test_nothing_heavy_is_imported_before_a_command_is_known(words: list[str]) -> None:
    script = (
        "import sys; from specforge_dspine.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'specforge', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_version_names_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"specforge-dspine {VERSION} (specforge ") and "sglang " in shown


def test_an_unknown_command_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traine", "--recipe", "x"]) == 2
    assert capsys.readouterr().err == "error: traine: no such command; did you mean train?\n"
    for words in (["zzz"], []):
        assert main(words) == 2
        assert "usage: specforge-dspine" in capsys.readouterr().err


def test_a_command_keeps_its_output_and_its_exit_status() -> None:
    """Missing vectors are unusable input: 2. Agreement is 0, and the table goes to stdout."""
    missing = run("conformance", NO_VECTORS)
    assert missing.returncode == 2 and NO_VECTORS in missing.stderr and "Traceback" not in missing.stderr
    agreed = run("conformance", "tests/golden/padded_vocab.safetensors")
    assert agreed.returncode == 0 and "232 of 232" in agreed.stdout


@pytest.mark.parametrize("words", [["export", "--help"], ["conformance", NO_VECTORS]])
def test_specforge_does_not_warn_of_flash_attn(words: list[str]) -> None:
    """It is imported with SpecForge's own drafts, and no path of DSpine uses it."""
    assert "flash_attn" not in run(*words).stderr


def test_other_warnings_are_shown_as_ever() -> None:
    script = "import specforge_dspine, warnings; warnings.warn('flash_attn is something else')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "flash_attn is something else" in done.stderr
