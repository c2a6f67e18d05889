"""Methods whose clients share prototypes, and how every method makes and compares them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.base import Family, Method
from mpfedcl.prototypes import (
    MOST_PROTOTYPES,
    PrototypePool,
    Prototypes,
    kmeans_prototypes,
    mean_prototypes,
)

UNIT_NORM = 1.001
"""The largest norm of a mean of unit vectors, with room for rounding."""


class PrototypeRule:
    """How prototypes are made from embeddings and compared with them.

    Every method has a rule (`prototype_rule`): a method that shares no prototypes is evaluated by
    nearest prototype too, and its prototypes then never leave the evaluation.
    """

    experiment: Experiment
    num_classes: int

    clustering: ClassVar[Literal["kmeans", "mean", "dbscan"]] = "kmeans"
    """How `summarize` makes the prototypes of a class; a method with dbscan overrides it."""
    normalizes: ClassVar[bool | None] = None
    """Whether embeddings are scaled to norm 1; None: the setting `prototypes.normalize`."""
    compares_with_own: ClassVar[bool] = False
    """Whether a client's own model is compared only with this client's prototypes in the pool."""

    def project(self, embeddings: Tensor) -> Tensor:
        """Return embeddings [..., d] in the space where prototypes are made and compared."""
        return normalize(embeddings, dim=-1, eps=1e-12) if self._has_unit_norm else embeddings

    def summarize(
        self, embeddings: Sequence[Tensor], labels: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[Prototypes]:
        """Return the prototypes of several clients from their projected embeddings [n_i, d]."""
        settings = self.experiment.prototypes
        common = {
            "num_classes": self.num_classes,
            "min_cluster_size": settings.min_cluster_size,
        }
        if self.clustering == "mean":
            return mean_prototypes(embeddings, labels, **common)
        number: int | Literal["auto"] = "auto" if self._chooses_number else self.num_prototypes or 1
        return kmeans_prototypes(
            embeddings, labels, seeds, num_prototypes=number, init=settings.init, **common
        )

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return the prototypes that clients are sent and predictions are compared with."""
        return pool

    @final
    def reference_of(self, client: str, reference: PrototypePool) -> PrototypePool:
        """Return the part of `reference` that a client's own model is compared with."""
        return reference.only(client) if self.compares_with_own else reference

    @property
    def num_prototypes(self) -> int | None:
        """The most prototypes per class and client in the pool; None: any number."""
        per_class = self.experiment.prototypes.per_class
        if self.clustering == "mean":
            return 1
        return None if self.clustering == "dbscan" or per_class == "auto" else per_class

    @final
    @property
    def max_prototypes(self) -> int | None:
        """The most prototypes of a class that an honest client sends, for update validation."""
        return MOST_PROTOTYPES if self._chooses_number else self.num_prototypes

    @final
    @property
    def max_norm(self) -> float:
        """The largest norm of an honest prototype, for update validation."""
        return UNIT_NORM if self._has_unit_norm else math.inf

    @property
    def _has_unit_norm(self) -> bool:
        return self.experiment.prototypes.normalize if self.normalizes is None else self.normalizes

    @property
    def _chooses_number(self) -> bool:
        return self.clustering == "kmeans" and self.num_prototypes is None


def prototype_rule(method: Method) -> PrototypeRule:
    """Return how a method's prototypes are made and compared, in evaluation if it shares none."""
    if isinstance(method, PrototypeRule):
        return method
    rule = PrototypeRule()
    rule.experiment, rule.num_classes = method.experiment, method.num_classes
    return rule


class SharesPrototypes(PrototypeRule, Method):
    """A method whose clients send prototypes of their classes, which form the server's pool.

    The pool is in `broadcast.pool` for `prepare`. The hooks of `PrototypeRule` define how
    prototypes are made (`project`, `summarize`) and which ones are sent back (`reference`).
    """

    family: ClassVar[Family] = "prototypes"
    sends_pool: ClassVar[bool] = True
    """Whether clients are sent `reference` of the pool; False: only the server uses it."""

    def shares_in(self, round_number: int) -> bool:
        """Return whether clients send prototypes in a round."""
        return True


def shares_prototypes_in(method: Method, round_number: int) -> bool:
    """Return whether a method's clients send prototypes in a round."""
    return isinstance(method, SharesPrototypes) and method.shares_in(round_number)


# Class means that the server keeps from round to round

CLASS_MEANS = "class_means"
"""The name of [C, d] in the server's state; zeros for a class that no client has held yet."""


def update_class_means(
    kept: Tensors, prototypes: Mapping[str, Prototypes], num_classes: int
) -> Tensors:
    """Return the sample-weighted means of the clients' prototypes by class.

    A class that none of the clients holds keeps its old mean.
    """
    if not any(len(each) for each in prototypes.values()):
        return kept
    centers = PrototypePool.gather(prototypes, num_classes=num_classes).class_centers()
    old = kept.get(CLASS_MEANS)
    means = centers.vectors.new_zeros(num_classes, centers.dimension) if old is None else old
    return {CLASS_MEANS: means.index_copy(0, centers.labels, centers.vectors)}


def class_means_pool(kept: Tensors, like: PrototypePool) -> PrototypePool:
    """Return kept class means as a pool, with the number of classes and type of another."""
    means = kept.get(CLASS_MEANS, like.vectors.new_zeros(like.num_classes, like.dimension))
    labels = means.any(dim=1).nonzero().squeeze(1)
    pool = like.merged_into(means[labels], labels, torch.ones_like(labels))
    return replace(pool, num_prototypes=1)
