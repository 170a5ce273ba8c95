"""The draft: block-causal layers, the transfer space, and adjacent causal injection (§2–§4)."""
