"""The paper's convergence section, checked on a run: what is measured, and which bounds hold."""

from mpfedcl.convergence.bounds import BOUNDS, Bounds, Constants, find_bounds, judge
from mpfedcl.convergence.diagnosis import Diagnosis, summarize_convergence
from mpfedcl.rounds.measurement import Inspection, Measurement, RoundMeasurement

__all__ = [
    "BOUNDS",
    "Bounds",
    "Constants",
    "Diagnosis",
    "Inspection",
    "Measurement",
    "RoundMeasurement",
    "find_bounds",
    "judge",
    "summarize_convergence",
]
