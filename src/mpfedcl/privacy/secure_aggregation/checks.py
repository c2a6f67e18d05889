"""Checks whether an experiment can use secure aggregation, before any work starts."""

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import OneShot, built_in_methods, find_method
from mpfedcl.privacy.secure_aggregation import LEAST_CLIENTS, check_installed

_BLINDED = (
    "Secure aggregation: the server sees only totals over clients, so it cannot validate, clip or "
    "reject a single update; it validates the totals."
)


def describe_secure_aggregation(experiment: Experiment) -> list[str]:
    """Return the notes to print at the start of a run; empty without secure aggregation."""
    if not experiment.secure_aggregation:
        return []
    method = find_method(experiment.method)
    lost = method.lost_by_totals if issubclass(method, OneShot) else ""
    return [_BLINDED, lost] if lost else [_BLINDED]


def check_secure_aggregation(experiment: Experiment) -> None:
    """Reject a resolved experiment whose server must see the updates of single clients."""
    if not experiment.secure_aggregation:
        return
    check_installed()
    method = find_method(experiment.method)
    if not method.totals_suffice:
        able = [name for name, each in built_in_methods().items() if each.totals_suffice]
        raise InvalidInput(
            f"method is {experiment.method!r}; with secure_aggregation it must be one of "
            f"{', '.join(able)}, or a class of your own that sets `totals_suffice = True`: other "
            "methods need the updates of single clients."
        )
    rule = experiment.aggregation.rule
    if rule != "mean":
        raise InvalidInput(
            f"aggregation.rule is {rule!r}; with secure_aggregation it must be 'mean': other rules "
            "compare single clients' updates, which the server does not see."
        )
    if experiment.statistics.keep == "clients":
        raise InvalidInput(
            "statistics.keep is 'clients'; with secure_aggregation it must be auto or pooled: "
            "the server does not see the statistics of single clients."
        )
    if experiment.privacy.has_budget:
        _check_budget(experiment)
    if experiment.asked_workers > 1:
        raise InvalidInput(
            f"workers is {experiment.workers}; with secure_aggregation it must be 1: the clients "
            "of a run mask their updates for each other."
        )


def _check_budget(experiment: Experiment) -> None:
    if experiment.privacy.model == "local":
        raise InvalidInput(
            "privacy.model is 'local'; with secure_aggregation it must be central: clients add "
            "shares of the noise, so the server sees no sum without noise."
        )
    if experiment.fraction < 1:
        raise InvalidInput(
            f"fraction is {experiment.fraction:g}; with secure_aggregation and a privacy budget it "
            "must be 1: the server knows the sampled clients, so sampling does not amplify privacy."
        )


def check_enough_clients(experiment: Experiment, num_clients: int) -> None:
    """Reject a simulation with too few clients per round."""
    chosen = min(num_clients, max(experiment.min_clients, round(experiment.fraction * num_clients)))
    if chosen < LEAST_CLIENTS:
        raise InvalidInput(
            f"{chosen} clients take part in a round (clients, fraction); with secure_aggregation "
            f"it must be at least {LEAST_CLIENTS}: with two, each could compute the other's update "
            "from the sum."
        )
