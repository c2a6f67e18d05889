"""What methods of one exchange share: clients send sums of frozen features, and nobody trains."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import (
    ClientMeans,
    Components,
    Covariance,
    choose_shrinkage,
    collect_sums,
    find_impossible_sums,
    make_components,
    pack_symmetric,
    unit_features,
)
from mpfedcl.messages import Update
from mpfedcl.methods.base import Method, Reading, Server, Tally
from mpfedcl.models import GaussianClassifier, Model
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.tensors import Tensors


class ClosedForm(Method):
    """A method that trains nothing: classifiers are linear in frozen features of length 1."""

    trains = False
    clustering = "mean"
    defaults = MappingProxyType({"rounds": 1, "encoder__name": "random-filters"})
    knobs = MappingProxyType({})

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if experiment.encoder.train:
            raise InvalidInput(
                f"encoder.train is True; {self.name} trains nothing, so it must be False."
            )

    def own_model(self, input_size: int) -> Model:
        """Scores that are linear in the features."""
        return GaussianClassifier(input_size, self.num_classes)

    def project(self, embeddings: Tensor) -> Tensor:
        """Features have length 1 already."""
        return embeddings

    def longest_prototype(self) -> float:
        """A mean of vectors of length 1 is no longer; the rest is rounding."""
        return 1.001


class OneExchange(ClosedForm, ABC):
    """Clients send sums, which are exactly the centralised ones whatever the skew.

    A subclass says with `fit` what classifier the sums give.
    """

    reading: ClassVar[Reading] = "averaged_classifier"
    shares_prototypes = True
    second_moment: ClassVar[Literal["none", "within", "whole"]] = "none"
    """What clients send beside counts and sums by class: nothing, the scatter within their classes,
    or the sum of phi phi'."""

    @abstractmethod
    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return the classifier of the pooled sums, and what clients are sent beside it.

        `sums` are those of all clients in float64, `groups` the class means of each.
        """

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return a client's sums; classes with too few samples stay at home."""
        counts = torch.bincount(labels, minlength=self.num_classes)
        sent = (counts >= self.experiment.prototypes.min_cluster_size)[labels]
        features, labels = unit_features(inputs[sent]), labels[sent]
        if self.second_moment == "within":
            return collect_sums(features, labels, self.num_classes)._asdict()
        counts = torch.bincount(labels, minlength=self.num_classes).to(features.dtype)
        sums = features.new_zeros(self.num_classes, features.shape[1])
        found = {"counts": counts, "sums": sums.index_add_(0, labels, features)}
        if self.second_moment == "whole":
            found["moment"] = pack_symmetric(features.T @ features)
        return found

    def judge_sums(self, update: Update, *, announced: Sequence[int] | None) -> str | None:
        """Return why no samples have these sums, or why they are not the announced ones."""
        if announced is not None and (reason := _judge_counts(update.summed["counts"], announced)):
            return reason
        in_full = announced is not None
        return find_impossible_sums(update.summed, update.num_samples, in_full=in_full)

    def prototypes_of(self, update: Update) -> Prototypes:
        """Return a client's class means: its sums say them already."""
        counts = update.summed["counts"]
        held = counts.nonzero().squeeze(1)
        means = update.summed["sums"][held] / counts[held].unsqueeze(1)
        return Prototypes(means, held, counts[held].round().long())

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Fit the classifier; where nobody has sent a class there is none."""
        if not any(len(each) for each in tally.prototypes.values()):
            return server
        pool = PrototypePool.gather(
            tally.prototypes, num_classes=self.num_classes, num_prototypes=1
        )
        components, extra = self.fit(tally.sums, ClientMeans.of_pool(pool))
        like = server.params["weight"]
        params = {name: value.to(like) for name, value in components._asdict().items()}
        return replace(server, params=params, extra=extra)

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """One prototype per class: the mean of all clients' samples."""
        return pool.class_centres()


def _judge_counts(counts: Tensor, announced: Sequence[int]) -> str | None:
    """Hold the counts that were sent to the announced ones; a class may stay at home as a whole."""
    for label, (sent, held) in enumerate(zip(counts.tolist(), announced, strict=True)):
        if sent not in (0, held):
            return f"class {label} has the count {sent:g}; this client has announced {held}"
    return None


def fit_classes(
    covariance: Covariance, degrees: float, sums: Tensors, *, hottest: float = math.inf
) -> Components:
    """Return one Gaussian per class around its mean, with a covariance that all share.

    `hottest` bounds the temperature.
    """
    present, means, counts = class_means(sums)
    shrinkage = choose_shrinkage(covariance, degrees, means, counts)
    origin = (counts.unsqueeze(1) * means).sum(0) / counts.sum()
    return make_components(
        means,
        covariance.solve(means - origin, shrinkage.weight),
        present,
        torch.ones_like(counts),
        origin=origin,
        temperature=min(shrinkage.temperature, hottest),
        num_classes=len(sums["counts"]),
    )


def class_means(sums: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes that somebody holds [K], their means [K, d] and counts [K]."""
    present = (sums["counts"] > 0).nonzero().squeeze(1)
    counts = sums["counts"][present].double()
    return present, sums["sums"][present].double() / counts.unsqueeze(1), counts
