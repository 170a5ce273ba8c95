"""The draft: block-causal layers, the transfer space, and adjacent causal injection (§2–§4)."""

from specforge_dspine.utils.versions import require

require("specforge")  # before the first import of it
