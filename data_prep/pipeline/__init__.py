"""Rows through worker processes into a ledger."""
