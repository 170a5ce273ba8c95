"""The target's responses from SGLang servers."""
