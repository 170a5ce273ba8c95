"""Proposals, the transition cache, and lossless verification (§6)."""
