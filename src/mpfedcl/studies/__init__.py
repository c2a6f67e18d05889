"""Studies of many runs: comparisons, tuning, parallel jobs, statistics."""
