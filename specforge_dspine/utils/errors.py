"""Exceptions that several packages raise. Each message names the field, its value, and what would work."""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe that cannot be run."""


class CheckpointError(ValueError):
    """A checkpoint that must not be used."""


class InvalidFileError(ValueError):
    """A file that is missing, or does not hold what its name says."""


class RunError(RuntimeError):
    """Work that cannot go on, for a reason outside of this program."""


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
