"""Small federations in double precision, and FedAvg by the trainer that other methods have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from identities import server_of

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_federated_data
from mpfedcl.methods import Context, Method, find_method
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import build_federation, small

Changes = dict[str, Any]
"""Settings that an experiment has otherwise."""

UNEQUAL: Changes = {"partition__kind": "quantity", "partition__alpha": 1.0}
"""Clients of different sizes, so that they take different numbers of steps."""


class PlainFedAvg(FedAvg):
    """FedAvg that no trainer shortens: its sums are taken in the order of methods with hooks."""

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        return super().finish(params, context, num_steps)


def federate(
    images: Path,
    method: str = "fedavg",
    rounds: int = 3,
    *,
    method_class: type[Method] | None = None,
    **changes: Any,
) -> RoundLoop:
    """Return a federation after some rounds."""
    experiment = small(images, method, **{"dtype": "float64", "rounds": rounds, **changes})
    federation = build_federation(experiment, method_class=method_class)
    for _ in range(rounds):
        federation.run_round(evaluate=False, keep_models=True)
    return federation


def begins_at(images: Path) -> Tensors:
    """Return the parameters before round 1."""
    return server_of(build_federation(small(images, "fedavg", dtype="float64")))


def client_states(federation: RoundLoop) -> dict[str, Tensors]:
    """Return what each client keeps, by client."""
    found: dict[str, Tensors] = {}
    for key, value in federation.engine.state().items():
        _, client, name = key.split("/", 2)
        found.setdefault(client, {})[name] = value
    return found


def weighted(each: Mapping[str, Tensors], weights: Mapping[str, float]) -> Tensors:
    """Return Σ_i weights_i x_i."""
    names = next(iter(each.values()))
    return {
        name: torch.stack([weights[client] * own[name] for client, own in each.items()]).sum(0)
        for name in names
    }


def data_of(images: Path, method: str = "fedavg", **changes: Any) -> FederatedData:
    settings = {"dtype": "float64", **changes}
    return load_federated_data(
        small(images, method, **settings).resolved(find_method(method).defaults)
    )
