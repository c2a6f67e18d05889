"""Differential privacy: sensitivities, noise, accounting, and the ledger of a budget."""
