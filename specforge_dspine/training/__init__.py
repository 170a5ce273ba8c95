"""Recipe, plan, and everything that plugs into SpecForge."""

from specforge_dspine.utils.versions import require

require("specforge")  # before the first import of it
