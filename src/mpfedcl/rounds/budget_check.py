"""What a privacy budget can be kept for, what it lets be told, and how many releases it covers."""

import math

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import (
    CollectsStatistics,
    Method,
    OneShot,
    PredictorName,
    SharesPrototypes,
)
from mpfedcl.privacy.extra import require_extra

BOTH = math.sqrt(2)
"""Sensitivity of a model and prototypes together, each of which has 1."""


def check_budget(method: Method) -> None:
    """Refuse a budget that nothing here can keep."""
    experiment, settings = method.experiment, method.experiment.privacy
    if not settings.has_budget:
        return
    require_extra()
    if isinstance(method, OneShot):
        if not method.has_private_sums:
            raise _no_mechanism(method, "it needs each client's own means")
    elif not (method.trains and method.shares_model):
        raise _no_mechanism(method, "its clients share no model")
    elif not method.plain_average or isinstance(method, CollectsStatistics):
        raise _no_mechanism(method, "its server does more than average")
    if method.trains and settings.unit == "record":
        raise InvalidInput(
            "privacy.unit is 'record'; with rounds of training it must be client: what one image "
            "does to a model is not bounded here. One-shot methods keep it for images."
        )
    if method.trains and settings.model == "local":
        raise InvalidInput(
            "privacy.model is 'local'; with rounds of training it must be central: noise of each "
            "client's own would drown the model."
        )
    required = {"aggregation__rule": "mean", "prototypes__min_cluster_size": 1}
    if method.trains and experiment.fraction < 1:
        # Everybody takes part by a draw of its own, or sampling protects nobody.
        required["min_clients"] = 1
    for name, value in required.items():
        if experiment.setting(name) != value:
            raise InvalidInput(
                f"{name.replace('__', '.')} is {experiment.setting(name)!r}; with a privacy budget "
                f"it must be {value}: the sensitivity is not bounded otherwise."
            )
    if method.trains and experiment.setting("update__clip") is not None:
        raise InvalidInput(
            f"update.clip is {experiment.setting('update__clip'):g}; with a privacy budget it must "
            "be left out: privacy.clip says how long a change may be."
        )


def _no_mechanism(method: Method, why: str) -> InvalidInput:
    return InvalidInput(
        f"privacy.epsilon is {method.experiment.privacy.epsilon:g}; with method {method.name} it "
        f"must be left out: {why}. A budget is kept for fedgauss, fedlda, fedncm and fedridge, and "
        "for methods that average models, such as fedavg, fedprox and mp-fedcl."
    )


def releases_prototypes(experiment: Experiment, round_number: int) -> bool:
    """Tell whether a round is one in which prototypes are released, if the method shares any."""
    return (round_number - 1) % experiment.privacy.release_every == 0


def planned_releases(
    experiment: Experiment, *, shares_prototypes: bool, first: int = 1
) -> dict[float, int]:
    """Return how many releases of which sensitivity the rounds from `first` on make."""
    planned = {1.0: 0, BOTH: 0}
    for number in range(first, experiment.rounds + 1):
        both = shares_prototypes and releases_prototypes(experiment, number)
        planned[BOTH if both else 1.0] += 1
    return {sensitivity: count for sensitivity, count in planned.items() if count}


def released_predictors(method: Method) -> tuple[PredictorName, ...]:
    """Return the predictors that may be told: under a budget, not all that there are.

    Those of a personal model, of a client's label shares and of prototypes that never travel look
    at training samples without noise.
    """
    if not method.experiment.privacy.has_budget:
        return method.predictors
    plain: tuple[PredictorName, ...] = ("global_classifier", "global_classifier_estimated")
    return (*plain, "global_prototype") if isinstance(method, SharesPrototypes) else plain
