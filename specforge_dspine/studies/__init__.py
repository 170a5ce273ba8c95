"""Readout, timing and predecessor studies of a trained draft (§1)."""
