"""Experiments: all settings of a run, validated, read from and written to TOML."""

from mpfedcl.experiment.experiment import (
    CHOSEN_BY_A_RUN,
    RESULT_NEUTRAL_SETTINGS,
    TUNED_RULE,
    Experiment,
)

__all__ = [
    "CHOSEN_BY_A_RUN",
    "RESULT_NEUTRAL_SETTINGS",
    "TUNED_RULE",
    "Experiment",
]
