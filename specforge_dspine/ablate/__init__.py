"""Variants of a recipe on the same data, seeds and budget."""
