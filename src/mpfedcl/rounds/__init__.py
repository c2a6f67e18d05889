"""The round loop, collector, update validation, aggregation, processors and evaluation."""
