"""Comparison with the float64 golden vectors."""
