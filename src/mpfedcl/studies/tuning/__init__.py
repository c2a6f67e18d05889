"""Choosing a method's settings on validation images, by the same budget for every method."""

from mpfedcl.studies.tuning.result import Trial, TuningResult, load_tuning
from mpfedcl.studies.tuning.search import BUDGET, TOLERANCE, VALIDATION, Search, run_searches

__all__ = [
    "BUDGET",
    "TOLERANCE",
    "VALIDATION",
    "Search",
    "Trial",
    "TuningResult",
    "load_tuning",
    "run_searches",
]
