"""Recipe, plan, and everything that plugs into SpecForge."""
