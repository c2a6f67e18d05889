"""An experiment as data: every setting, validated, TOML in and out. Nothing here needs torch."""

from mpfedcl.experiment.chosen_settings import CHOSEN_BY_A_RUN
from mpfedcl.experiment.experiment import (
    FORMAT,
    ONCE_THE_ONLY_VALUES,
    RESULT_NEUTRAL_SETTINGS,
    Experiment,
)

__all__ = [
    "CHOSEN_BY_A_RUN",
    "FORMAT",
    "ONCE_THE_ONLY_VALUES",
    "RESULT_NEUTRAL_SETTINGS",
    "Experiment",
]
