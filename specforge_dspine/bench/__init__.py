"""Timings of training steps, decoding rounds, and memory."""
