"""Aggregation rules by name."""

from mpfedcl.core.plugins import entry_points, load
from mpfedcl.rounds.aggregation.base import Aggregator, Peers, RuleOverAll
from mpfedcl.rounds.aggregation.by_distances import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
)
from mpfedcl.rounds.aggregation.coordinate_wise import CoordinateMedian, TrimmedMean
from mpfedcl.rounds.aggregation.mean import WeightedMean

__all__ = ["RULES", "Aggregator", "Peers", "RuleOverAll", "find_aggregator"]

RULES: dict[str, type[Aggregator]] = {
    "centered-clipping": CenteredClipping,
    "geometric-median": GeometricMedian,
    "krum": Krum,
    "mean": WeightedMean,
    "median": CoordinateMedian,
    "multi-krum": MultiKrum,
    "trimmed-mean": TrimmedMean,
}
"""The built-in rules; `experiment.names.AGGREGATION_RULES` describes them without torch."""


def find_aggregator(rule: str) -> type[Aggregator]:
    """Return a built-in rule, or one of another package, by its `aggregation.rule`."""
    if rule in RULES:
        return RULES[rule]
    offered: type[Aggregator] = load(entry_points("mpfedcl.aggregators")[rule], "aggregation.rule")
    return offered
