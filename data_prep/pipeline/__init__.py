"""Rows through worker processes into the ledger of a job."""
