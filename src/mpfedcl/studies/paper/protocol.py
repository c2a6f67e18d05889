"""What the paper's experiments have in common: methods, rounds, and how a number is looked up."""

from collections.abc import Iterable, Mapping
from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.studies.paper.item import Published
from mpfedcl.studies.paper.published import MeanAndDeviation

METHODS = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedproto": "FedProto",
    "dp-fedcl": "DP-FedCL",
    "sp-fedcl": "SP-FedCL",
    "mp-fedcl": "MP-FedCL",
}
ROUNDS = 60
"""Of the FedCL family everywhere, and of all methods in the tuned track."""
FREQUENT_EVALUATION, RARE_EVALUATION = 5, 20
"""Rounds between two evaluations: where a table shows the way there, and where only the end.

Evaluating all models on all tests takes longer than training them.
"""
_FEDCL_FAMILY = ("dp-fedcl", "sp-fedcl", "mp-fedcl")


def paper_experiment(dataset: str, method: str, rounds: int = ROUNDS, **changes: Any) -> Experiment:
    """Return an experiment of the paper: its settings are the defaults."""
    return Experiment().replace(
        dataset__name=dataset,
        method=method,
        rounds=rounds,
        **{
            "evaluate_every": RARE_EVALUATION,
            # Tables have a method's own reading also where it is judged by another.
            "evaluate_predictors": "all",
            "personal_models": False,
            "trail": False,
            **changes,
        },
    )


def method_rounds(method: str, others: int) -> int:
    """Return 60 for the FedCL family, and what the others get."""
    return ROUNDS if method in _FEDCL_FAMILY else others


def find_published(numbers: Mapping[str, MeanAndDeviation], key: str) -> Published | None:
    """Return a published number, if there is one."""
    return Published(*numbers[key]) if key in numbers else None


def method_titles(keys: Iterable[str]) -> dict[str, str]:
    """Return the titles of some methods."""
    return {key: METHODS[key] for key in keys}
