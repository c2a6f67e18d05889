"""Choosing a method's settings on validation images, by the same budget for every method."""

from mpfedcl.studies.tuning.search import Search, run_searches, tune
from mpfedcl.studies.tuning.tuning import Trial, Tuning, load_tuning

__all__ = ["Search", "Trial", "Tuning", "load_tuning", "run_searches", "tune"]
