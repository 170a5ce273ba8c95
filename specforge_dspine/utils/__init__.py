"""Helpers without torch models, SpecForge or a trainer; they also run inside an SGLang server."""
