"""Choosing a method's settings on validation images, by the same budget for every method."""

from mpfedcl.tuning.search import Search, run_searches, tune
from mpfedcl.tuning.tuning import Trial, Tuning, load_tuning

__all__ = ["Search", "Trial", "Tuning", "load_tuning", "run_searches", "tune"]
