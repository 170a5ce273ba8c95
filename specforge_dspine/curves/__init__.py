"""Reference training curves and their comparison."""
