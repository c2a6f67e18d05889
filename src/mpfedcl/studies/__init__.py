"""Studies of many runs: comparisons, tuning, statistics."""
