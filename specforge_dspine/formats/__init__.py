"""Checkpoints on disk: config.json, reading, writing, and the layouts of others."""
