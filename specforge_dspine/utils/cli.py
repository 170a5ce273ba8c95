"""Parsing, running and reporting of a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from specforge_dspine.utils.signals import Interrupted, signals_as_exceptions


def positive(text: str) -> int:
    """An integer from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1")
    return value


def run(
    made: argparse.ArgumentParser, work: Callable[[argparse.Namespace], str], arguments: Sequence[str] | None
) -> None:
    """Parses, works, and prints the sentence that comes back; errors that a user can mend end it with a message."""
    options = made.parse_args(arguments)
    try:
        with signals_as_exceptions():
            print(work(options))
    except Interrupted as signal:
        print(f"stopped by {signal}; the same command continues", file=sys.stderr)
        sys.exit(128 + signal.signum)
    except (ValueError, OSError) as error:  # LedgerError and ConnectionError among them
        sys.exit(f"error: {error}")
