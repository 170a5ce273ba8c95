"""Helpers that several test files share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
