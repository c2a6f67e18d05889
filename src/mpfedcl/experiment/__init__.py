"""An experiment as data: every setting, validated, TOML in and out. Nothing here needs torch."""

from mpfedcl.experiment.experiment import FORMAT, INDIFFERENT, Experiment

__all__ = ["FORMAT", "INDIFFERENT", "Experiment"]
