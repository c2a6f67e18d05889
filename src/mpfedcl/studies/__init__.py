"""Studies of many runs: comparisons, tuning, the tables of the paper, statistics."""
