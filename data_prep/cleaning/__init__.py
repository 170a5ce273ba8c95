"""Conversation formats, filters, duplicates and decontamination."""
