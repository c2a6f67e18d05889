"""The paper's convergence section, checked on a run: what is measured, and which bounds hold."""

from mpfedcl.convergence.bounds import (
    BOUNDS,
    Bounds,
    Constants,
    RoundMeasurement,
    find_bounds,
    judge,
)
from mpfedcl.convergence.diagnostics import ConvergenceDiagnostics, summarize_convergence
from mpfedcl.rounds.measurement import Inspection, Measurement

__all__ = [
    "BOUNDS",
    "Bounds",
    "Constants",
    "ConvergenceDiagnostics",
    "Inspection",
    "Measurement",
    "RoundMeasurement",
    "find_bounds",
    "judge",
    "summarize_convergence",
]
