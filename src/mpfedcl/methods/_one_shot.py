"""Methods whose clients send statistics, and one-shot methods, fitted to them in closed form."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpfedcl import gaussian
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import ClientMeans, Components, Covariance, Metric, SecondMoment, Shrinkage
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.methods._prototypes import PrototypeRule, SharesPrototypes
from mpfedcl.methods.base import Family, Method, Server, Tally
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.methods.predictors import PredictorName
from mpfedcl.models import GaussianClassifier, Model
from mpfedcl.prototypes import PrototypePool, Prototypes

_FEW_VALUES = 256
"""A sample with fewer values has random features next to them."""
_MOST_FEATURES = 8192
"""A square matrix of this size takes half a gigabyte."""


class CollectsStatistics(Method, ABC):
    """A method whose clients send statistics of their samples, which the server adds up.

    `reduce` finds the sums in `tally.sums`. With `trains = False` clients send nothing else.
    """

    @abstractmethod
    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return statistics of a client's training samples, to be summed over clients.

        Without samples they must be zeros of the same shapes and types.
        """

    def validate_statistics(self, update: Update, *, announced: Sequence[int] | None) -> str | None:
        """Return why a client's statistics are impossible, or None; shapes were checked before.

        `announced`: the samples by class that a client on another machine has announced; its
        statistics are checked in full. None: they were computed in this process.
        """
        return None

    def totals_of(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return what a client adds to the totals under secure aggregation, given its statistics.

        Integers have the type int64. Without samples all are zeros of the same shapes.
        """
        return dict(summed)

    def validate_totals(self, totals: Tensors) -> str | None:
        """Return why totals are impossible, or None."""
        return None


def collect_statistics(method: Method, inputs: Tensor, labels: Tensor) -> Tensors:
    """Return the statistics that a method's client sends; empty unless it collects any."""
    return method.collect(inputs, labels) if isinstance(method, CollectsStatistics) else {}


class ClosedForm(PrototypeRule, Method):
    """A method that trains nothing: classifiers are linear in frozen features of norm 1."""

    family: ClassVar[Family] = "one-shot"
    sends = "counts, sums and second moments"
    trains = False
    clustering = "mean"
    normalizes = True
    defaults = {
        "rounds": 1,
        "encoder__name": "random-filters",
        "model__name": "mlp",
        "model__norm": "none",
        "model__embedding": None,
        "model__train": (),
        "model__share": (),
    }
    search_space = {}

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        if experiment.encoder.train:
            raise InvalidInput(
                f"encoder.train is True; {self.name} trains nothing, so it must be False."
            )

    def make_model(self, input_size: int) -> Model:
        """Return a model whose scores are linear in the features."""
        if input_size > _MOST_FEATURES:
            raise InvalidInput(
                f"samples have {input_size:,} values; with method {self.name}, which holds a "
                f"square matrix of that size, at most {_MOST_FEATURES:,}: use an encoder, or "
                "leave some out."
            )
        return GaussianClassifier(input_size, self.num_classes, self.features)

    def features(self, inputs: Tensor) -> Tensor:
        """Return the features of inputs [n, ...]: norm 1, under a privacy budget projected.

        Under a budget there are no random features: the noise grows with the number of features.
        """
        privacy = self.experiment.privacy
        if privacy.has_budget:
            features = gaussian.unit_features(inputs)
            return gaussian.project_features(features, privacy.dimensions, self.experiment.seed)
        if inputs.shape[-1] < _FEW_VALUES:
            return gaussian.random_features(inputs, self.experiment.statistics.random_features)
        return gaussian.unit_features(inputs)

    @property
    def is_noisy(self) -> bool:
        """Return whether statistics have the noise of a privacy budget, in the covariance, too."""
        return self.experiment.privacy.has_budget

    def project(self, embeddings: Tensor) -> Tensor:
        """Return features unchanged: their norm is already 1."""
        return embeddings

    def personalize(self, received: Any, inputs: Tensor, labels: Tensor) -> Tensors | None:
        """Return a client's personalized model from its training samples; None: it has none.

        `received` is the value that `prepare` makes of the broadcast after the round.
        """
        return None


class OneShot(ClosedForm, CollectsStatistics, SharesPrototypes, ABC):
    """Clients send sufficient statistics once; their sums are exactly the centralized ones.

    A subclass defines in `fit` the classifier for these sums. The statistics outlive the run, so
    that clients can join and leave it exactly.
    """

    primary_predictor: ClassVar[PredictorName] = "global_classifier"
    totals_suffice = True
    lost_by_totals: ClassVar[str] = ""
    """A sentence about the loss of accuracy under secure aggregation."""
    second_moment: ClassVar[SecondMoment | None] = None
    """The second moment that clients send next to counts and sums by class, if any."""
    has_private_sums: ClassVar[bool] = True
    """Whether noisy sums over all clients suffice to fit the classifier (privacy budget)."""
    estimates_effects: ClassVar[bool] = False
    """Whether `fit` estimates how clients differ: totals then have further statistics, and clients
    are sent the estimates, which otherwise the server keeps."""
    own_statistics = staticmethod(gaussian.own_statistics)
    statistics_of = staticmethod(gaussian.pooled_of_totals)
    _nothing_sent: bool = False

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        wants_moments = experiment.privacy.moments or self.second_moment == "moment"
        has_moments = wants_moments and self.second_moment is not None
        self.private_sums = PrivateSums.of(experiment.privacy, has_moments=has_moments)
        """The mechanism that adds noise to sums; None: there is no privacy budget."""
        self._sent_moment = self.second_moment
        if self.private_sums is not None:
            # The scatter around each client's own means has no bounded sensitivity.
            self._sent_moment = "moment" if has_moments else None

    @abstractmethod
    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return the classifier for the pooled statistics, and further estimates.

        `sums` are the statistics of all clients in float64, `groups` the class means of each
        client. Under secure aggregation `sums` are totals (`totals_of`), and `groups` has one
        client that represents all. If the classifier has a metric, the estimates are `covariance`
        (S, packed) and `fit`, whose first value is the shrinkage lambda.
        """

    def collect(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Return counts, sums and second moments, without classes of too few samples."""
        least = self.experiment.prototypes.min_cluster_size
        sent = (torch.bincount(labels, minlength=self.num_classes) >= least)[labels]
        features = self.features(inputs[sent])
        return gaussian.sum_samples(features, labels[sent], self.num_classes, self._sent_moment)

    def validate_statistics(self, update: Update, *, announced: Sequence[int] | None) -> str | None:
        """Return why no samples have these sums, or why they are not the announced ones."""
        summed, most, in_full = update.summed, update.num_samples, announced is not None
        if self.private_sums is not None:
            if self.private_sums.is_local:
                return self.private_sums.find_impossible(summed)
            if self.private_sums.unit == "client":
                # Clipped counts are no longer integers.
                return None
            # Under a privacy budget sizes are not announced.
            most, in_full = self.experiment.network.max_images, False
        elif announced is not None and (reason := _check_counts(summed["counts"], announced)):
            return reason
        return gaussian.find_impossible_sums(summed, most, in_full=in_full)

    def totals_of(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return the pooled statistics of one client, and statistics of how clients differ.

        Under a privacy budget they are the unchanged sums, to which noise is added.
        """
        if self.private_sums is not None:
            return {name: value.double() for name, value in summed.items()}
        one = self.pool_of_one(self.own_statistics(summed))
        return gaussian.totals_of_one(one, with_effects=self.estimates_effects)

    def validate_totals(self, totals: Tensors) -> str | None:
        """Return why no clients have these totals."""
        if self.private_sums is not None:
            # More than half of the clients are left: their noise has less than twice the variance.
            noisy = self.private_sums.with_share(math.sqrt(2) * self.private_sums.sigma)
            return noisy.find_impossible(totals)
        return gaussian.find_impossible_totals(totals)

    def prototypes_of(self, update: Update) -> Prototypes:
        """Return the class means in an update's statistics: they are the client's prototypes."""
        if self.private_sums is not None:
            # Class means of single clients are not released.
            return update.prototypes
        counts = update.summed["counts"]
        held = counts.nonzero().squeeze(1)
        means = update.summed["sums"][held] / counts[held].unsqueeze(1)
        return Prototypes(means, held, counts[held].round().long())

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Fit the classifier; without any statistics it is unchanged."""
        if self.private_sums is None:
            self._nothing_sent = not any(len(each) for each in tally.prototypes.values())
        else:
            self._nothing_sent = not bool(tally.sums["counts"].any())
        if self._nothing_sent:
            return server
        pool = PrototypePool.gather(
            tally.prototypes, num_classes=self.num_classes, num_prototypes=1
        )
        if self.private_sums is None:
            return self._serve(server, tally.sums, pool)
        # Noisy sums are fitted as if one client had them all.
        own = {name: tally.sums[name] for name in ("counts", "sums", "moment")}
        return self.refit(server, self.pool_of_one(own), pool)

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Warn if no client has sent statistics of any class."""
        if not self._nothing_sent:
            return {}
        if self.private_sums is not None:
            cause = "No class stands out from the noise, so the classifier knows none"
            return {"warnings": [f"{cause}: mpfedcl privacy plan shows what a budget costs."]}
        least = self.experiment.prototypes.min_cluster_size
        return {
            "warnings": [
                f"No client has sent a class, so the classifier knows none: each has fewer than "
                f"{least} samples of every class (prototypes.min_cluster_size)."
            ]
        }

    def pool_of_one(self, own: Tensors) -> Tensors:
        """Return what a client with these statistics adds to the pooled ones of all clients."""
        return gaussian.pool_of_one(own, self.second_moment)

    def refit(self, server: Server, pooled: Tensors, pool: PrototypePool) -> Server:
        """Fit the classifier to pooled statistics and the class means of single clients."""
        return self._serve(server, gaussian.sums_to_fit(pooled, self.second_moment), pool)

    def personalize_from(
        self, received: Any, own: Tensors, sharpness: float = 1.0
    ) -> Tensors | None:
        """Return a personalized model as `personalize`, from statistics instead of samples.

        `sharpness` is what a client has chosen by its samples.
        """
        return None

    def sharpness_of(self, received: Any, own: Tensors, personal: Tensors) -> float:
        """Return the sharpness that a personalized model was made with from these statistics."""
        return 1.0

    def _serve(self, server: Server, sums: Tensors, pool: PrototypePool) -> Server:
        components, found = self.fit(sums, ClientMeans.of_pool(pool))
        like = server.params["weight"]
        params = {name: value.to(like) for name, value in components._asdict().items()}
        if self.estimates_effects:
            return replace(server, params=params, extra=found)
        return replace(server, params=params, private={**server.private, **found})

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return one prototype per class: the mean of all clients' samples."""
        return pool.class_centers()

    def metric(self, fitted: Tensors, pool: PrototypePool) -> Metric | None:
        """Return the metric of the classifier around its components; None if it has none.

        `fitted` are the tensors that the server keeps next to its parameters.
        """
        if not {"covariance", "fit"} <= fitted.keys():
            return None
        prototypes = self.component_prototypes(fitted, pool)
        return Metric(fitted["covariance"], float(fitted["fit"][0]), prototypes)

    def component_prototypes(self, fitted: Tensors, pool: PrototypePool) -> PrototypePool:
        """Return the prototypes at the centers of the global classifier's components."""
        return self.reference(pool)


def degrees_of(sums: Tensors, groups: ClientMeans) -> float:
    """Return Σ_i f_i: the samples less the groups of client and class, at least 1."""
    if is_total(sums):
        return max(1.0, float(sums["counts"].sum() - sums["groups"].sum()))
    return max(1.0, float(groups.degrees.sum()))


def is_total(sums: Tensors) -> bool:
    """Return whether sums are totals, which include statistics of how clients differ."""
    return "groups" in sums


def describe_metric(covariance: Tensor, shrinkage: Shrinkage) -> Tensors:
    """Return S [d, d] and its shrinkage, as `OneShot.metric` reads them."""
    fit = torch.tensor([*shrinkage], dtype=torch.float64, device=covariance.device)
    return {"covariance": gaussian.pack_symmetric(covariance).float(), "fit": fit}


def _check_counts(counts: Tensor, announced: Sequence[int]) -> str | None:
    """Compare counts with the announced ones; a class may be left out as a whole."""
    for label, (sent, held) in enumerate(zip(counts.tolist(), announced, strict=True)):
        if sent not in (0, held):
            return f"class {label} has the count {sent:g}; this client has announced {held}"
    return None


def fit_classes(
    covariance: Covariance,
    degrees: float,
    sums: Tensors,
    *,
    wide: bool = True,
    hottest: float = math.inf,
) -> tuple[Components, Shrinkage]:
    """Return one Gaussian per class around its mean, with a covariance that all share.

    `wide` is as for `choose_shrinkage`; `hottest` bounds the temperature.
    """
    present, means, counts = class_means(sums)
    shrinkage = gaussian.choose_shrinkage(covariance, degrees, means, counts, wide=wide)
    origin = (counts.unsqueeze(1) * means).sum(0) / counts.sum()
    components = gaussian.make_components(
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
    """Return the classes that any client holds [K], their means [K, d] and counts [K]."""
    present = (sums["counts"] > 0).nonzero().squeeze(1)
    counts = sums["counts"][present].double()
    return present, sums["sums"][present].double() / counts.unsqueeze(1), counts
