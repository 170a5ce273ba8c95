"""Acceptance length on benchmarks, with confidence intervals."""
