"""FedGauss: a Gaussian classifier in closed form (introduced in this package), one-shot."""

import math
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from mpfedcl import gaussian
from mpfedcl.gaussian import ClientEffects, ClientMeans, Components, Covariance, Degrees, Shrinkage
from mpfedcl.methods import Broadcast, OneShot, PrototypePool, Tensors
from mpfedcl.methods._one_shot import class_means, degrees_of, fit_classes, is_total


class GaussianPool(NamedTuple):
    """The pooled estimates that a client needs for its own classifier."""

    covariance: Covariance
    shrinkage: Shrinkage
    effects: ClientEffects
    strength: float
    """nu, of `own_strength`."""
    means: Tensor
    """[C, d], float64."""
    counts: Tensor
    """[C], float64: 0 for a class that no client holds."""

    def to(self, dtype: torch.dtype) -> Self:
        """Return the estimates in another precision, which suffices for a single client."""
        means, counts = self.means.to(dtype), self.counts.to(dtype)
        return self._replace(covariance=self.covariance.to(dtype), means=means, counts=counts)


class FedGauss(OneShot):
    """Each class of each client is a Gaussian around a prototype; all share one covariance.

    Clients upload class counts [C], feature sums [C, d] and the scatter within classes [d, d] once.
    Class c of client i has the prototype mu_c + b_i + e_ic and a shrunk covariance: b_i shifts all
    classes of a client, e_ic a single class, and both variances are estimated from the statistics.
    Under label skew clients differ only in their classes, under feature skew in everything. Local
    test sets are predicted with the client's own prototypes, covariance and class prior; the global
    test set with the mixture over all clients (under secure aggregation: one Gaussian per class).
    """

    name = "fedgauss"
    summary = "Gaussian prototypes in closed form, one-shot, no training"
    paper = "this package"
    primary_predictor = "personal_classifier_prior"
    primary_predictor_global = "global_classifier"
    second_moment = "within"
    estimates_effects = True
    lost_by_totals = (
        "With totals only, the global test set is predicted with one Gaussian per class, not with "
        "the mixture over clients."
    )
    _pool: tuple[Tensor, GaussianPool] | None = None
    """Decomposed once for the server and the clients of one process."""

    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Return the mixture over clients, and the covariance and estimates for clients."""
        _, means, counts = class_means(sums)
        everywhere = sums["sums"].double() / sums["counts"].double().clamp(min=1).unsqueeze(1)
        scale = degrees_of(sums, groups)
        # In the precision that clients receive: the estimates must match their computations.
        within = (sums["within"] / scale).to(getattr(torch, self.experiment.dtype))
        covariance = Covariance.decompose(gaussian.unpack_symmetric(within, means.shape[1]))
        shrinkage = gaussian.choose_shrinkage(covariance, scale, means, counts)
        totals = sums if is_total(sums) else groups.totals()
        effects = gaussian.estimate_effects(totals, everywhere, covariance.trace)
        total = float(totals["counts"].sum() - totals["groups"].sum())
        degrees = Degrees(total, float(totals["degrees_squared"]), int(totals["free_clients"]))
        strength = gaussian.own_strength(covariance, degrees, float(sums["scatter"]))
        pool = GaussianPool(
            covariance, shrinkage, effects, strength, everywhere, sums["counts"].double()
        )
        # Messages carry no infinities.
        numbers = [*shrinkage, *effects, 1 / strength]
        self._pool = within, pool
        components = _classes(sums) if is_total(sums) else _mixture(pool, groups)
        return components, {
            "covariance": within,
            "fit": torch.tensor(numbers, dtype=torch.float64, device=within.device),
        }

    def prepare(self, broadcast: Broadcast) -> GaussianPool | None:
        """Return the pooled estimates of the server; None before the statistics are summed."""
        if "covariance" not in broadcast.extra:
            return None
        within, pool = broadcast.extra["covariance"], broadcast.pool
        if self._pool is None or self._pool[0] is not within:
            weight, temperature, shift, by_class, trust = broadcast.extra["fit"].tolist()
            groups = ClientMeans.of_pool(pool)
            self._pool = (
                within,
                GaussianPool(
                    Covariance.decompose(gaussian.unpack_symmetric(within, pool.dimension)),
                    Shrinkage(weight, temperature),
                    ClientEffects(shift, by_class),
                    1 / trust if trust else math.inf,
                    groups.class_means,
                    groups.class_counts,
                ),
            )
        return self._pool[1].to(getattr(torch, self.experiment.dtype))

    def personalize(
        self, received: GaussianPool | None, inputs: Tensor, labels: Tensor
    ) -> Tensors | None:
        """Return a client's own classifier: its prototypes, in its own metric."""
        if received is None:
            return None
        features = self.features(inputs)
        counts = torch.bincount(labels, minlength=self.num_classes)
        sums = torch.zeros_like(received.means).index_add_(0, labels, features)
        centered = gaussian.center_by_class(features, labels, counts, sums)
        return self._own_classifier(received, counts.to(sums), sums, centered)

    def personalize_from(self, received: GaussianPool | None, own: Tensors) -> Tensors | None:
        """Return the same classifier from a client's statistics, or from their `scatter_rows`."""
        if received is None:
            return None
        rows = own["rows"] if "rows" in own else gaussian.scatter_rows(own)
        parts = (part.to(received.means) for part in (own["counts"], own["sums"], rows))
        return self._own_classifier(received, *parts)

    def _own_classifier(
        self, received: GaussianPool, counts: Tensor, sums: Tensor, centered: Tensor
    ) -> Tensors:
        held = counts.nonzero().squeeze(1)
        own = ClientMeans(
            sums[held] / counts[held].unsqueeze(1),
            held,
            counts[held],
            torch.zeros_like(held),
            1,
            self.num_classes,
        )
        # A class that no client has sent is known only from the client's own samples.
        known = received.counts > 0
        means = torch.where(known.unsqueeze(1), received.means, own.class_means)
        shifts = received.effects.shifts(own, means)
        prototypes = means + shifts
        prototypes[held] = received.effects.group_means(own, means, shifts)
        answered = (known | (counts > 0)).nonzero().squeeze(1)
        origin = _overall_mean(received)
        solved = gaussian.solve_own(
            prototypes[answered] - origin,
            received.covariance,
            centered,
            float(own.degrees.sum()),
            received.strength,
            received.shrinkage.weight,
        )
        components = gaussian.make_components(
            prototypes[answered],
            solved,
            answered,
            torch.ones_like(prototypes[answered, 0]),
            origin=origin,
            temperature=received.shrinkage.temperature,
            num_classes=self.num_classes,
        )
        return components._asdict()

    def component_prototypes(self, fitted: Tensors, pool: PrototypePool) -> PrototypePool:
        """Return each client's prototypes, or one per class if clients do not differ."""
        effects = ClientEffects(*fitted["fit"][2:4].tolist())
        if not any(effects):
            return self.reference(pool)
        groups = ClientMeans.of_pool(pool)
        means = groups.class_means
        vectors = effects.group_means(groups, means, effects.shifts(groups, means))
        return replace(pool, vectors=vectors)

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Record the estimates."""
        if self._pool is None:
            return super().remarks(broadcast)
        pool = self._pool[1]
        names = ("shrinkage", "temperature", "shift", "class_effect", "own_covariance")
        values = (*pool.shrinkage, *pool.effects, 1 / pool.strength)
        return {"fit": {n: float(f"{v:.6g}") for n, v in zip(names, values, strict=True)}}


def _overall_mean(pool: GaussianPool) -> Tensor:
    return (pool.counts.unsqueeze(1) * pool.means).sum(0) / pool.counts.sum().clamp(min=1)


def _classes(totals: Tensors) -> Components:
    """Return one Gaussian per class, with the covariance of all samples around class means."""
    size, classes = totals["sums"].shape[1], int((totals["counts"] > 0).sum())
    moment = gaussian.unpack_symmetric(totals["moment"], size)
    around = gaussian.within_from_moment(moment, totals["counts"], totals["sums"])
    degrees = max(1.0, float(totals["counts"].sum()) - classes)
    return fit_classes(Covariance.decompose(around / degrees), degrees, totals)[0]


def _mixture(pool: GaussianPool, groups: ClientMeans) -> Components:
    """Return each class as the mixture of its clients' Gaussians; one if they coincide."""
    if pool.effects.shift or pool.effects.by_class:
        shifts = pool.effects.shifts(groups, pool.means)
        prototypes = pool.effects.group_means(groups, pool.means, shifts)
        labels, shares = groups.labels, groups.counts / pool.counts[groups.labels]
    else:
        labels = pool.counts.nonzero().squeeze(1)
        prototypes, shares = pool.means[labels], torch.ones_like(pool.counts[labels])
    origin = _overall_mean(pool)
    return gaussian.make_components(
        prototypes,
        pool.covariance.solve(prototypes - origin, pool.shrinkage.weight),
        labels,
        shares,
        origin=origin,
        temperature=pool.shrinkage.temperature,
        num_classes=len(pool.counts),
    )
