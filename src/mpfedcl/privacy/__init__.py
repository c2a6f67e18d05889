"""Differential privacy (accounting, ledger, releases) and secure aggregation."""
