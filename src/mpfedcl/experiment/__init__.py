"""An experiment as data: every setting, validated, TOML in and out. Nothing here needs torch."""

from mpfedcl.experiment.experiment import Experiment
from mpfedcl.experiment.setting_groups import (
    CHOSEN_BY_A_RUN,
    ONCE_THE_ONLY_VALUES,
    RESULT_NEUTRAL_SETTINGS,
)

__all__ = [
    "CHOSEN_BY_A_RUN",
    "ONCE_THE_ONLY_VALUES",
    "RESULT_NEUTRAL_SETTINGS",
    "Experiment",
]
