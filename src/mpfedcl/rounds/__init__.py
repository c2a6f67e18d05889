"""One round without files or processes: guard, aggregation, evaluation, the loop itself."""
