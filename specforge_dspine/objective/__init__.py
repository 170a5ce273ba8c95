"""The dual-output distillation loss, layer alignment, and the curriculum (§5)."""
