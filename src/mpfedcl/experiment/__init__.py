"""An experiment as data: every setting, validated, TOML in and out. Nothing here needs torch."""

from mpfedcl.experiment.experiment import (
    FORMAT,
    ONCE_THE_ONLY_VALUES,
    RESULT_NEUTRAL_SETTINGS,
    Experiment,
)

__all__ = ["FORMAT", "ONCE_THE_ONLY_VALUES", "RESULT_NEUTRAL_SETTINGS", "Experiment"]
