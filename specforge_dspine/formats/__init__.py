"""Drafts on disk: configuration, reading in every known layout, writing."""
