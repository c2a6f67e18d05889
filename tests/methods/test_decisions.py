"""Which methods the engines, validation, privacy and the pool treat specially.

Each table names the methods for which one decision is yes. A change of a base class that moves a
method from one table to another changes how it is trained, validated or refused.
"""

from collections.abc import Callable

import pytest
from tiny_method_inputs import make_broadcast, make_method, make_pool

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import (
    Asynchronous,
    ClosedForm,
    CollectsStatistics,
    Method,
    OneShot,
    PartialModel,
    Server,
    SharesPrototypes,
    Tally,
    TwoModels,
    Update,
    built_in_methods,
    prototype_rule,
)
from mpfedcl.methods.fedavg import FedAvg

OWN_STEPS = "aso-fed cmfl ditto fedavg-ft fedbabu feddyn fednh fedrep fedrod moon pfedme scaffold"
ONE_SHOT = "fedcof fedgauss fedlda fedncm fedridge"
DECISIONS: dict[str, tuple[str, Callable[[type[Method]], bool]]] = {
    # Moon, CMFL and FedRep pass some of their hooks unchanged.
    "is trained step by step, never by rows": (OWN_STEPS, lambda m: not m.plain_steps),
    # FedRep keeps parameters, not a state: it shares only some of them.
    "has clients that keep a state": (OWN_STEPS, lambda m: not m.plain_steps),
    # Any `finish` of a method's own was allowed to before this was a declaration.
    "may withhold an update": ("cmfl", lambda m: m.may_withhold),
    "allows secure aggregation": (
        "ditto fedavg fedavg-ft fedbabu fedbn feddyn fedgauss fedlc fedlda fedmmd fedncm fedopt "
        "fedper fedprox fedridge fedrod fedrs local local-gauss moon pfedme scaffold",
        lambda m: m.totals_suffice,
    ),
    "sends parts of the model": ("afd fed-dropout", lambda m: issubclass(m, PartialModel)),
    "compares clients with their own prototypes": (
        "fedpcl",
        lambda m: issubclass(m, SharesPrototypes) and m.compares_with_own,
    ),
    "has a server that does more than average": (
        f"afd cmfl fed-dropout {ONE_SHOT} feddyn fednh fednova fedopt fedproc fedtgp pfedme "
        "proto-attention scaffold",
        lambda m: not m.plain_average or issubclass(m, CollectsStatistics),
    ),
    "is one-shot": (ONE_SHOT, lambda m: issubclass(m, OneShot)),
    "does not train": (f"{ONE_SHOT} local-gauss", lambda m: not m.trains),
    "brings its own model": (f"{ONE_SHOT} local-gauss", lambda m: issubclass(m, ClosedForm)),
    "shares prototypes": (
        f"{ONE_SHOT} dp-fedcl fednh fedpcl fedplvm fedproc fedproto fedtgp fpl mp-fedcl mpfed "
        "proto-attention proto-inference sp-fedcl",
        lambda m: issubclass(m, SharesPrototypes),
    ),
    "is asynchronous": (
        "aso-fed async-share fedasync fedat sageflow",
        lambda m: issubclass(m, Asynchronous),
    ),
    "trains two models": ("ditto fedavg-ft fedbabu fedrod", lambda m: issubclass(m, TwoModels)),
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_decision_about_every_method(decision: str) -> None:
    wanted, decide = DECISIONS[decision]
    found = {name for name, method in built_in_methods().items() if decide(method)}
    assert found == set(wanted.split())


def test_only_these_methods_send_the_pool_unchanged() -> None:
    found = set()
    for name, kind in built_in_methods().items():
        if issubclass(kind, SharesPrototypes):
            method = make_method(name)
            pool = make_pool(method)
            if prototype_rule(method).reference(pool) is pool:
                found.add(name)
    assert found == {"dp-fedcl", "fedpcl", "mp-fedcl", "proto-attention", "sp-fedcl"}


def test_only_these_methods_prepare_a_broadcast() -> None:
    # Asynchronous clients are stacked across versions if there is nothing to prepare.
    found = set()
    for name, kind in built_in_methods().items():
        # One-shot methods need statistics first, and FedBN a model with norms.
        if not issubclass(kind, OneShot) and name != "fedbn":
            method = make_method(name)
            if method.prepare(make_broadcast(method)) is not None:
                found.add(name)
    wanted = (
        "cmfl dp-fedcl fedpcl fedplvm fedproc fedproto fedtgp fpl mp-fedcl pfedme scaffold sp-fedcl"
    )
    assert found == {*wanted.split()}


class Weighs(Method):
    def weigh(self, update: Update, server: Server) -> float:
        return 1.0


class AveragesByOwnWeight(FedAvg, Weighs):
    pass


class Promises(AveragesByOwnWeight):
    totals_suffice = True


class Reduces(FedAvg):
    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        return server


class Keeps(FedAvg):
    def init_client(self, params: Tensors) -> Tensors:
        return params


def test_overridden_hooks_reset_class_promises() -> None:
    assert FedAvg.totals_suffice
    assert not AveragesByOwnWeight.totals_suffice
    assert Promises.totals_suffice
    assert (FedAvg.plain_average, Reduces.plain_average) == (True, False)
    assert (FedAvg.plain_steps, Keeps.plain_steps, Reduces.plain_steps) == (True, False, True)
