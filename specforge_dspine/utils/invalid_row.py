"""The exception for a row of data that cannot be used."""

from __future__ import annotations


class InvalidRow(ValueError):
    """A row that cannot be used.

    Attributes:
        reason: the kind of problem, the same words for each of its kind.
        detail: where in the row, the value, and what to do.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason
