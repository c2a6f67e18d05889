"""What one-shot methods share: clients send sums of frozen features, and nobody trains."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import (
    ClientMeans,
    Components,
    Covariance,
    Metric,
    SecondMoment,
    Shrinkage,
    StackedSums,
    choose_shrinkage,
    find_impossible_sums,
    find_impossible_totals,
    make_components,
    own_statistics,
    pack_symmetric,
    pool_of_one,
    pooled_of_totals,
    project_features,
    sums_to_fit,
    totals_of_one,
    unit_features,
)
from mpfedcl.methods._predictors import PredictorName
from mpfedcl.methods._round_values import Server, Tally
from mpfedcl.methods.base import Method
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import GaussianClassifier, Model
from mpfedcl.privacy.private_sums import PrivateSums
from mpfedcl.prototypes import PrototypePool, Prototypes

_MOST_FEATURES = 8192
"""Its matrix takes half a gigabyte."""


class ClosedForm(Method):
    """A method that trains nothing: classifiers are linear in frozen features of length 1."""

    family = "one-shot"
    sends = "counts, sums and second moments"
    trains = False
    clustering = "mean"
    defaults = MappingProxyType(
        {
            "rounds": 1,
            "encoder__name": "random-filters",
            "model__name": "mlp",
            "model__norm": "none",
        }
    )
    search_space = MappingProxyType({})

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if experiment.encoder.train:
            raise InvalidInput(
                f"encoder.train is True; {self.name} trains nothing, so it must be False."
            )

    def own_model(self, input_size: int) -> Model:
        """Scores that are linear in the features."""
        if input_size > _MOST_FEATURES:
            raise InvalidInput(
                f"samples have {input_size:,} numbers; with method {self.name}, which holds a "
                f"matrix of as many rows and columns, at most {_MOST_FEATURES:,}: give an encoder, "
                "or leave some out."
            )
        return GaussianClassifier(input_size, self.num_classes, self.features)

    def features(self, inputs: Tensor) -> Tensor:
        """Return what a sample is to this method: length 1, and under a budget few dimensions."""
        privacy = self.experiment.privacy
        features = unit_features(inputs)
        if not privacy.has_budget:
            return features
        return project_features(features, privacy.dimensions, self.experiment.seed)

    def project(self, embeddings: Tensor) -> Tensor:
        """Features have length 1 already."""
        return embeddings

    def longest_prototype(self) -> float:
        """A mean of vectors of length 1 is no longer; the rest is rounding."""
        return 1.001


class OneShot(ClosedForm, ABC):
    """Clients send sums, which are exactly the centralised ones whatever the skew.

    A subclass says with `fit` what classifier the sums give.
    """

    predictor: ClassVar[PredictorName] = "global_classifier"
    shares_prototypes = True
    keeps_sums = True
    totals_suffice = True
    second_moment: ClassVar[SecondMoment | None] = None
    """What clients send beside counts and sums by class, if anything."""
    has_private_sums: ClassVar[bool] = True
    """Whether the classifier can be made of noisy sums of all clients together, under a budget."""
    _nothing_sent: bool = False
    sends_fit: ClassVar[bool] = False
    """Whether clients need what `fit` has found beside the classifier; else the server keeps it."""
    estimates_effects: ClassVar[bool] = False
    """Whether `fit` finds out how clients differ; where only totals are known that takes more."""

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        wants_moments = experiment.privacy.moments or self.second_moment == "moment"
        has_moments = wants_moments and self.second_moment is not None
        self.private_sums = PrivateSums.of(experiment.privacy, has_moments=has_moments)
        """How sums get noise; None: as they are."""
        self._sent_moment = self.second_moment
        if self.private_sums is not None:
            # The one around each client's own means has no bounded sensitivity.
            self._sent_moment = "moment" if has_moments else None

    @abstractmethod
    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return the classifier of the pooled sums, and what else was found.

        `sums` are those of all clients in float64, `groups` the class means of each; where only
        totals are known `groups` is of one client that stands for all, and `sums` are `totals_of`
        them. What was found has `covariance`, S packed, and `fit`, which begins with lambda, if
        there is such a metric.
        """

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return a client's sums."""
        return dict(self.collect_many([inputs], [labels])[0])

    def collect_many(
        self, inputs: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Return the sums of several clients; classes with too few samples stay at home."""
        sent = [self._is_sent(each) for each in labels]
        chosen = torch.cat([each[kept] for each, kept in zip(inputs, sent, strict=True)])
        stack = StackedSums(
            self.features(chosen),
            torch.cat([each[kept] for each, kept in zip(labels, sent, strict=True)]),
            [int(kept.sum()) for kept in sent],
            self.num_classes,
            self._sent_moment,
        )
        return [stack.member(index) for index in range(len(stack))]

    def _is_sent(self, labels: Tensor) -> Tensor:
        counts = torch.bincount(labels, minlength=self.num_classes)
        return (counts >= self.experiment.prototypes.min_cluster_size)[labels]

    def judge_sums(self, update: Update, *, announced: Sequence[int] | None) -> str | None:
        """Return why no samples have these sums, or why they are not the announced ones."""
        if self.private_sums is not None:
            return self._judge_private_sums(update)
        if announced is not None and (reason := _judge_counts(update.summed["counts"], announced)):
            return reason
        in_full = announced is not None
        return find_impossible_sums(update.summed, update.num_samples, in_full=in_full)

    def _judge_private_sums(self, update: Update) -> str | None:
        """Judge sums under a budget: nobody has announced how many samples there are."""
        assert self.private_sums is not None
        if self.private_sums.is_local:
            return self.private_sums.find_impossible(update.summed)
        if self.private_sums.unit == "client":
            # Shortened to the clip, counts are no whole numbers any more.
            return None
        most = self.experiment.network.max_images
        return find_impossible_sums(update.summed, most, in_full=False)

    def totals_of(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return the pooled statistics of one client alone, and what tells clients apart.

        Under a privacy budget the sums as they are: what they add up to gets noise.
        """
        if self.private_sums is not None:
            return {name: value.double() for name, value in summed.items()}
        one = self.pool_of_one(self.own_statistics(summed))
        return totals_of_one(one, with_effects=self.estimates_effects)

    def judge_totals(self, totals: Tensors) -> str | None:
        """Return why no clients have these totals."""
        if self.private_sums is not None:
            # More than half of the clients are left: their noise has less than twice the variance.
            noisy = self.private_sums.with_share(math.sqrt(2) * self.private_sums.sigma)
            return noisy.find_impossible(totals)
        return find_impossible_totals(totals)

    def statistics_of(self, totals: Tensors) -> Tensors:
        """Return what is kept of totals."""
        return pooled_of_totals(totals)

    def prototypes_of(self, update: Update) -> Prototypes:
        """Return a client's class means: its sums say them already."""
        if self.private_sums is not None:
            # No single client's may be told.
            return update.prototypes
        counts = update.summed["counts"]
        held = counts.nonzero().squeeze(1)
        means = update.summed["sums"][held] / counts[held].unsqueeze(1)
        return Prototypes(means, held, counts[held].round().long())

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Fit the classifier; where nobody has sent a class there is none."""
        if self.private_sums is not None:
            return self._serve_noisy(server, tally)
        self._nothing_sent = not any(len(each) for each in tally.prototypes.values())
        if self._nothing_sent:
            return server
        pool = PrototypePool.gather(
            tally.prototypes, num_classes=self.num_classes, num_prototypes=1
        )
        return self._serve(server, tally.sums, pool)

    def _serve_noisy(self, server: Server, tally: Tally) -> Server:
        """Fit the classifier to noisy sums, as if one client had them all."""
        own = {name: tally.sums[name] for name in ("counts", "sums", "moment")}
        self._nothing_sent = not bool(own["counts"].any())
        if self._nothing_sent:
            return server
        pool = PrototypePool.gather(
            tally.prototypes, num_classes=self.num_classes, num_prototypes=1
        )
        return self.refit(server, self.pool_of_one(own), pool)

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Warn where all have kept everything at home."""
        if not self._nothing_sent:
            return {}
        if self.private_sums is not None:
            told = "No class stands out from the noise, so the classifier knows none"
            return {"warnings": [f"{told}: mpfedcl privacy plan says what a budget costs."]}
        least = self.experiment.prototypes.min_cluster_size
        return {
            "warnings": [
                f"No client has sent a class, so the classifier knows none: each has fewer than "
                f"{least} samples of every class (prototypes.min_cluster_size)."
            ]
        }

    def own_statistics(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return counts, sums and second moments, which add up over samples."""
        return own_statistics(summed)

    def pool_of_one(self, own: Tensors) -> Tensors:
        """Return the same, and what adds up over clients."""
        return pool_of_one(own, self.second_moment)

    def refit(self, server: Server, pooled: Tensors, pool: PrototypePool) -> Server:
        """Fit the classifier to kept statistics and the class means of the clients behind them."""
        return self._serve(server, sums_to_fit(pooled, self.second_moment), pool)

    def personalize_from(self, received: Any, own: Tensors) -> Tensors | None:
        """Return what `personalize` does, of a client's statistics in place of its samples."""
        return None

    def _serve(self, server: Server, sums: Tensors, pool: PrototypePool) -> Server:
        components, found = self.fit(sums, ClientMeans.of_pool(pool))
        like = server.params["weight"]
        params = {name: value.to(like) for name, value in components._asdict().items()}
        if self.sends_fit:
            return replace(server, params=params, extra=found)
        return replace(server, params=params, private={**server.private, **found})

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """One prototype per class: the mean of all clients' samples."""
        return pool.class_centres()

    def metric(self, fitted: Tensors, pool: PrototypePool) -> Metric | None:
        """The metric that the classifier scores with, around the prototypes of its parts."""
        if not {"covariance", "fit"} <= fitted.keys():
            return None
        prototypes = self.prototypes_of_parts(fitted, pool)
        return Metric(fitted["covariance"], float(fitted["fit"][0]), prototypes)

    def prototypes_of_parts(self, fitted: Tensors, pool: PrototypePool) -> PrototypePool:
        """Return the prototypes that the averaged classifier is made of."""
        return self.reference(pool)


def degrees_of(sums: Tensors, groups: ClientMeans) -> float:
    """Return Σ_i f_i: the samples less the groups of client and class, at least 1."""
    if is_total(sums):
        return max(1.0, float(sums["counts"].sum() - sums["groups"].sum()))
    return max(1.0, float(groups.degrees.sum()))


def is_total(sums: Tensors) -> bool:
    """Tell whether nothing is known of single clients, so that sums say what tells them apart."""
    return "groups" in sums


def describe_metric(covariance: Tensor, shrinkage: Shrinkage) -> Tensors:
    """Return S [d, d] and how far it is shrunk, as `OneShot.metric` reads them."""
    fit = torch.tensor([*shrinkage], dtype=torch.float64, device=covariance.device)
    return {"covariance": pack_symmetric(covariance).float(), "fit": fit}


def _judge_counts(counts: Tensor, announced: Sequence[int]) -> str | None:
    """Hold the counts that were sent to the announced ones; a class may stay at home as a whole."""
    for label, (sent, held) in enumerate(zip(counts.tolist(), announced, strict=True)):
        if sent not in (0, held):
            return f"class {label} has the count {sent:g}; this client has announced {held}"
    return None


def fit_classes(
    covariance: Covariance, degrees: float, sums: Tensors, *, hottest: float = math.inf
) -> tuple[Components, Shrinkage]:
    """Return one Gaussian per class around its mean, with a covariance that all share.

    `hottest` bounds the temperature.
    """
    present, means, counts = class_means(sums)
    shrinkage = choose_shrinkage(covariance, degrees, means, counts)
    origin = (counts.unsqueeze(1) * means).sum(0) / counts.sum()
    components = make_components(
        means,
        covariance.solve(means - origin, shrinkage.weight),
        present,
        torch.ones_like(counts),
        origin=origin,
        temperature=min(shrinkage.temperature, hottest),
        num_classes=len(sums["counts"]),
    )
    return components, shrinkage


def class_means(sums: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes that somebody holds [K], their means [K, d] and counts [K]."""
    present = (sums["counts"] > 0).nonzero().squeeze(1)
    counts = sums["counts"][present].double()
    return present, sums["sums"][present].double() / counts.unsqueeze(1), counts
