"""Data preparation: prompts, the target's responses, training samples."""
