"""Exceptions that several packages raise."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that must not be used; the message names the tensor, key or flag."""


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the key, its value and what would work."""
