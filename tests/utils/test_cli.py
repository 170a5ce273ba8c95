"""The command-line runner: options from a model, ranges, exit statuses, messages."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from specforge_dspine.utils.cli import Command, IdList, Options, option, run_command
from specforge_dspine.utils.errors import RunError


class Sample(Options):
    """One option of every kind."""

    samples: Path = option("a path")
    layers: IdList = option("ids in one word", default=(1, 2))
    sets: tuple[str, ...] = option("one or more words", default=("a",))
    batch: int = option("samples a call", default=8, ge=1)
    share: Annotated[float, Field(ge=0, lt=1)] | None = option("of all", default=None)
    mode: Literal["fast", "exact"] = option("how", default="fast")
    overwrite: bool = option("replace", default=False)
    overrides: tuple[str, ...] = option("key=value", default=(), positional=True)


def run(*words: str, work: object = repr) -> int:
    return run_command(Command(Sample, work), words, module="m", doc="text")  # type: ignore[arg-type]


def test_every_kind_of_option_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["--layers", "3,5", "--sets", "x", "y", "--batch", "2", "--share", "0.5", "--mode", "exact"]
    assert run("j=2", "--samples", "s", *kinds, "--overwrite", "k=1") == 0
    shown = capsys.readouterr().out
    assert "layers=(3, 5), sets=('x', 'y'), batch=2, share=0.5, mode='exact', overwrite=True" in shown
    assert "overrides=('j=2', 'k=1')" in shown
    assert run("--samples", "s", "--", "--x", "3") == 0
    assert "overrides=('--x', '3')" in capsys.readouterr().out
    assert run("--samples", "s") == 0
    assert "layers=(1, 2), sets=('a',), batch=8, share=None, mode='fast'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "0"], "--batch 0: input should be greater than or equal to 1"),
        (["--batch", "many"], "--batch many: input should be a valid integer"),
        (["--share", "1"], "--share 1: input should be less than 1"),
        (["--share", "nan"], "--share nan: input should be"),
        (["--layers", "1,x"], "--layers 1,x: "),
        (["--mode", "slow"], "invalid choice: 'slow'"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_value_out_of_range_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--samples", "s", *words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_help_shows_ranges_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    shown = capsys.readouterr().out
    assert "usage: python -m m" in shown and "samples a call (default 8)" in shown and "{fast,exact}" in shown


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("bad"), 2), (FileNotFoundError("bad"), 2), (RunError("bad"), 1)]
)
def test_errors_become_a_line_and_a_status(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Options) -> str:
        raise error

    assert run("--samples", "s", work=fail) == status
    assert capsys.readouterr().err == "error: bad\n"


def test_advice_follows_a_failure_of_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Options) -> str:
        raise RunError("bad")

    def advice(options: Sample) -> str:
        return f"rerun {options.samples}"

    assert run_command(Command(Sample, fail), ["--samples", "s"], module="m", doc=None, advice=advice) == 1
    assert capsys.readouterr().err == "error: bad\nFix the error above, then rerun s.\n"


def test_an_unforeseen_error_keeps_its_traceback() -> None:
    def fail(_: Options) -> str:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run("--samples", "s", work=fail)


def test_a_signal_ends_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(_: Options) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not reached")

    assert run("--samples", "s", work=stop) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "stopped by SIGTERM; the same command continues\n"


def test_subcommands_have_options_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(Options):
        rank: int = option("of it", default=4, gt=0)

    commands = {"sample": Command(Sample, lambda o: "sample"), "other": Command(Other, lambda o: f"rank {o.rank}")}
    assert run_command(commands, ["other", "--rank", "7"], module="m", doc=None) == 0
    assert capsys.readouterr().out == "rank 7\n"
    with pytest.raises(SystemExit):
        run_command(commands, ["other", "--batch", "7"], module="m", doc=None)
