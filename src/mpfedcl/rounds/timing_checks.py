"""What goes together with an asynchronous method; the rest is refused before anything is begun."""

from inspect import isabstract

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, Method, PartialModel, SharesPrototypes


def check_timing(method: type[Method], experiment: Experiment) -> None:
    """Refuse what a method without rounds cannot be run with, and what lost answers cannot."""
    if experiment.systems.drop and experiment.secure_aggregation:
        raise InvalidInput(
            f"systems.drop is {experiment.systems.drop:g}; with secure_aggregation it must be 0: clients that "
            "vanish from a sum are not simulated."
        )
    if (
        experiment.systems.has_clock
        and experiment.secure_aggregation
        and experiment.network.enough < 1
    ):
        raise InvalidInput(
            f"network.enough is {experiment.network.enough:g}; with secure_aggregation on a virtual clock "
            "it must be 1: clients that vanish from a sum are not simulated."
        )
    if not issubclass(method, Asynchronous):
        return
    told = f"with {experiment.method}, which is asynchronous, it must be"
    if issubclass(method, SharesPrototypes) or not method.trains:
        raise InvalidInput(
            f"method is {experiment.method!r}, which is asynchronous; it must be an "
            "mpfedcl.methods.Asynchronous that trains and shares no prototypes."
        )
    if isabstract(method):
        raise InvalidInput(
            f"method is {experiment.method!r}, which does not say what the server does with an "
            "answer; it must have the method arrive(server, arrivals)."
        )
    if issubclass(method, PartialModel):
        raise InvalidInput(
            f"method is {experiment.method!r}, which sends parts of a model and is asynchronous; "
            "it must be one or the other."
        )
    if experiment.asked_workers > 1:
        raise InvalidInput(
            f"workers is {experiment.workers}; {told} 1: clients answer one after the other."
        )
    if experiment.secure_aggregation:
        raise InvalidInput(
            f"secure_aggregation is on; {told} off: there is no round whose clients could be summed."
        )
    if experiment.privacy.has_budget:
        raise InvalidInput(
            f"privacy.epsilon is {experiment.privacy.epsilon:g}; {told} left out: the budget "
            "counts rounds, and here clients answer as often as they can."
        )
    if experiment.aggregation.rule != "mean":
        raise InvalidInput(
            f"aggregation.rule is {experiment.aggregation.rule!r}; {told} mean: other rules "
            "compare the clients of a round."
        )
    if experiment.validation.bounds == "on":
        raise InvalidInput(
            f"validation.bounds is 'on'; {told} auto or off: bounds compare the clients of a round."
        )


def check_clock(method: type[Method], experiment: Experiment) -> None:
    """Refuse to simulate a method without rounds where there is no clock."""
    if issubclass(method, Asynchronous) and not experiment.systems.has_clock:
        raise InvalidInput(
            f"systems.kind is {experiment.systems.kind or 'none'!r}; with {experiment.method}, which is "
            "asynchronous, it must be lognormal or tiers. Clients are equally fast with lognormal "
            "and systems.spread 0."
        )


def refuse_over_network(method: type[Method], experiment: Experiment) -> None:
    """Refuse what only a simulation has: its clock, and images that no client holds."""
    if experiment.systems.has_clock:
        raise InvalidInput(
            f"systems.kind is {experiment.systems.kind!r}; over a network it must be none or left out: "
            "time is real there."
        )
    if experiment.public.size and "public__size" not in method.defaults:
        raise InvalidInput(
            f"public.size is {experiment.public.size}; over a network it must be 0 or left out: "
            f"with {experiment.method} the server has no images there."
        )
