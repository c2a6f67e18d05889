"""Runs: the run directory, records, checkpoints, and the loop that writes them."""
