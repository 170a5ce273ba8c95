"""Speculative decoding: candidates, refinement, transition cache, proposals, lossless verification (§6)."""
