"""The dual-output distillation loss, layer alignment, and the curriculum (§5)."""

from specforge_dspine.utils.versions import require

require("specforge")  # before the first import of it
