"""Rows from files, folders, packages and data sets."""
