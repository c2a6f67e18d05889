"""An experiment as data: every setting, validated, TOML in and out. Nothing here needs torch."""

from mpfedcl.experiment.experiment import (
    CHOSEN_BY_A_RUN,
    RESULT_NEUTRAL_SETTINGS,
    Experiment,
)

__all__ = [
    "CHOSEN_BY_A_RUN",
    "RESULT_NEUTRAL_SETTINGS",
    "Experiment",
]
