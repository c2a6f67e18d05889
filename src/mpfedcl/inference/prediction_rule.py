"""By what a run's models answer: the rule of its predictor, and what is far from its prototypes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Method, OneShot, prototype_rule
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.label_prior import log_prior


@dataclass(frozen=True)
class ReadingRule:
    """What of a predictor is left once it is settled whose model answers."""

    by_prototype: bool
    """The nearest prototype decides; else the classifier."""
    with_prior: bool
    """A client's label shares are added to the classifier's scores."""

    @classmethod
    def of(cls, predictor: str, *, has_prototypes: bool) -> "ReadingRule":
        """Return the rule of a predictor; without prototypes the classifier is all there is."""
        by_prototype = "prototype" in predictor and has_prototypes
        return cls(by_prototype, "classifier" in predictor and predictor.endswith("_prior"))


@dataclass(frozen=True)
class ComparisonSpace:
    """Where samples are held against prototypes."""

    prototypes: PrototypePool
    project: Callable[[Tensor], Tensor]
    """From projected embeddings into that space."""
    has_metric: bool
    """Whether distances are those of the method's own metric."""

    def seen_by(self, method: Method, client: str) -> "ComparisonSpace":
        """Return the space with the prototypes that a client's own model is compared with."""
        if self.has_metric:
            return self
        return replace(
            self, prototypes=prototype_rule(method).reference_of(client, self.prototypes)
        )


def find_comparison_space(
    method: Method, pool: PrototypePool | None, fitted: Tensors
) -> ComparisonSpace | None:
    """Return where distances are measured; None without prototypes."""
    if pool is None or not len(pool):
        return None
    metric = method.metric(fitted, pool) if isinstance(method, OneShot) else None
    if metric is not None:
        return ComparisonSpace(metric.prototypes, metric.whiten, has_metric=True)
    reference = prototype_rule(method).reference(pool)
    return ComparisonSpace(reference, lambda z: z, has_metric=False) if len(reference) else None


def counts_of(partition: Mapping[str, Any], client: str, num_classes: int) -> list[int] | None:
    """Return how many training samples of each class partition.json says that a client has."""
    clients = partition.get("clients", {})
    if not isinstance(clients, dict) or client not in clients:
        return None
    told = clients[client].get("train") if isinstance(clients[client], dict) else None
    counts = [each for each in told if type(each) is int] if isinstance(told, list) else []
    if len(counts) != num_classes or told != counts or min(counts) < 0:
        raise InvalidInput(
            f"partition.json must say of {client} how many samples of each of {num_classes} "
            "classes it has trained with."
        )
    return counts


def find_label_prior(
    partition: Mapping[str, Any], pool: PrototypePool | None, client: str, num_classes: int
) -> Tensor | None:
    """Return the log of a client's label shares [C]: from partition.json, else from the pool."""
    if (counts := counts_of(partition, client, num_classes)) is not None:
        return log_prior(torch.tensor(counts))
    # A client that has joined since.
    if pool is None or client not in pool.names:
        return None
    own = pool.of(client)
    return log_prior(
        torch.zeros(num_classes).double().index_add_(0, own.labels, own.counts.double())
    )
