"""The paper's convergence section, checked on a run: what is measured, and which bounds hold."""

from mpfedcl.convergence.bounds import (
    BOUNDS,
    Bounds,
    Constants,
    RoundMeasurement,
    find_bounds,
    judge,
)
from mpfedcl.convergence.diagnostics import FILE, ConvergenceDiagnostics, summarize_convergence
from mpfedcl.convergence.inspecting_engine import InspectingEngine, inspect_where_asked
from mpfedcl.convergence.measurement import Inspection, Measurement

__all__ = [
    "BOUNDS",
    "FILE",
    "Bounds",
    "Constants",
    "ConvergenceDiagnostics",
    "InspectingEngine",
    "Inspection",
    "Measurement",
    "RoundMeasurement",
    "find_bounds",
    "inspect_where_asked",
    "judge",
    "summarize_convergence",
]
