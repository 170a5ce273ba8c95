"""Stages: commands that are timed and logged, and end together when one fails."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from specforge_dspine.utils.stages import StageError, Stages


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> str:
    """A module that ``python -m`` finds."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return name


def test_a_stage_is_timed_and_its_output_appended_to_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = module(tmp_path, monkeypatch, "echo", "import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'])")
    log = tmp_path / "log"
    with Stages() as stages:
        for _ in range(2):
            stages.run(echo, "--limit", 3, tmp_path, name="echoed", threads=1, log=log)
    assert log.read_text(encoding="utf-8").splitlines() == [f"['--limit', '3', '{tmp_path}'] 1"] * 2
    assert list(stages.seconds) == ["echoed"]


def test_a_failing_stage_is_named_with_the_last_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = module(tmp_path, monkeypatch, "failing", "print('error: no data\\n\\n'); raise SystemExit(3)")
    with Stages() as stages, pytest.raises(StageError, match=r"failing ended with status 3; .* with: error: no data"):
        stages.run(failing, log=tmp_path / "log")


def test_one_failure_ends_the_stages_beside_it_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = module(tmp_path, monkeypatch, "failing", "raise SystemExit(1)")
    sleeping = module(tmp_path, monkeypatch, "sleeping", "import time; time.sleep(60)")
    started = time.monotonic()
    with Stages() as stages:
        jobs = [partial(stages.run, each) for each in (sleeping, failing, sleeping)]
        with pytest.raises(StageError, match="failing ended with status 1"):
            stages.run_parallel(jobs)
        assert time.monotonic() - started < 30 and not stages.running
        with pytest.raises(StageError, match="was not started"):
            stages.run(sleeping)
