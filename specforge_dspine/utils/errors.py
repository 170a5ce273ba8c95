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
