"""Aggregation rules: each is a file of this folder, found by its name."""

from functools import cache
from importlib import import_module

from mpfedcl.core.plugins import entry_points, load
from mpfedcl.experiment.names import AGGREGATION_RULES
from mpfedcl.rounds.aggregation.base import Aggregator, Peers, RuleOverAll

__all__ = ["Aggregator", "Peers", "RuleOverAll", "find_aggregator"]


@cache
def find_aggregator(rule: str) -> type[Aggregator]:
    """Return the rule of a name that `aggregation.rule` allows: trimmed-mean is trimmed_mean.py."""
    if rule not in AGGREGATION_RULES:
        offered: type[Aggregator] = load(
            entry_points("mpfedcl.aggregators")[rule], "aggregation.rule"
        )
        return offered
    module = import_module(f"{__name__}.{rule.replace('-', '_')}")
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, Aggregator)
        and each.__module__ == module.__name__
    ]
    return found[0]
