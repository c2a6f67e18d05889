"""Results in Python: runs, comparisons and searches, read from their folders."""

from mpfedcl.report.results.loaded import Loaded, LoadedComparison, LoadedRun, LoadedSearch
from mpfedcl.report.results.loading import load, read_result

__all__ = ["Loaded", "LoadedComparison", "LoadedRun", "LoadedSearch", "load", "read_result"]
