"""Signals as exceptions, also where a library turns them into errors of its own."""

from __future__ import annotations

import os
import signal

import pytest

from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_survives_a_library_that_raises_its_own_error(number: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as found, signals_as_exceptions():
        try:
            os.kill(os.getpid(), number)
        except BaseException as error:
            raise RuntimeError(f"acknowledgment failed: {error}") from None
    assert found.value.signum == number and isinstance(found.value.__cause__, RuntimeError)
    assert signal.getsignal(number) is before


def test_errors_without_a_signal_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="other"), signals_as_exceptions():
        raise RuntimeError("other")
