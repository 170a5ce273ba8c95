"""Differences of two nested JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ABSENT = "absent"


def differences(then: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs, as (dotted name, value then, value now); a missing value is ``ABSENT``."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            yield from differences(then.get(key, ABSENT), now.get(key, ABSENT), f"{name}.{key}" if name else key)
    elif then != now:
        yield name, then, now
