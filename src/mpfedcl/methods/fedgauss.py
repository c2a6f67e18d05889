"""FedGauss: a Gaussian classifier in closed form (introduced in this package), one-shot."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpfedcl import gaussian
from mpfedcl.gaussian import (
    ClientEffects,
    ClientMeans,
    Components,
    Covariance,
    Degrees,
    GaussianPool,
    Shrinkage,
)
from mpfedcl.methods import Broadcast, OneShot, PrototypePool, Tensors
from mpfedcl.methods._one_shot import class_means, degrees_of, fit_classes, is_total


class FedGauss(OneShot):
    """Each class of each client is a Gaussian around a prototype; all share one covariance.

    Clients upload class counts [C], feature sums [C, d] and the scatter within classes [d, d] once.
    Class c of client i has the prototype mu_c + b_i + e_ic and a shrunk covariance: b_i shifts all
    classes of a client, e_ic a single class, and both variances are estimated from the statistics.
    Under label skew clients differ only in their classes, under feature skew in everything. Local
    test sets are predicted with the client's own prototypes, covariance, class prior and sharpness,
    chosen by leave-one-out; the global test set with the mixture over all clients (under secure
    aggregation: one Gaussian per class).
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
        shrinkage = gaussian.choose_shrinkage(
            covariance, scale, means, counts, wide=not self.is_noisy
        )
        totals = sums if is_total(sums) else groups.totals()
        effects = gaussian.estimate_effects(totals, everywhere, covariance.trace)
        total = float(totals["counts"].sum() - totals["groups"].sum())
        degrees = Degrees(total, float(totals["degrees_squared"]), int(totals["free_clients"]))
        strength = gaussian.own_strength(covariance, degrees, float(sums["scatter"]))
        held = sums["counts"].double()
        pool = GaussianPool(covariance, shrinkage, effects, strength, scale, everywhere, held)
        # Messages carry no infinities.
        numbers = [*shrinkage, *effects, 1 / strength, scale]
        self._pool = within, pool
        components = (
            _classes(sums, wide=not self.is_noisy) if is_total(sums) else _mixture(pool, groups)
        )
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
            weight, temperature, shift, by_class, trust, scale = broadcast.extra["fit"].tolist()
            groups = ClientMeans.of_pool(pool)
            self._pool = (
                within,
                GaussianPool(
                    Covariance.decompose(gaussian.unpack_symmetric(within, pool.dimension)),
                    Shrinkage(weight, temperature),
                    ClientEffects(shift, by_class),
                    1 / trust if trust else math.inf,
                    scale,
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
        features = self.features(inputs).to(received.means)
        counts = torch.bincount(labels, minlength=self.num_classes).to(features)
        sums = torch.zeros_like(received.means).index_add_(0, labels, features)
        centered = gaussian.center_by_class(features, labels, counts, sums)
        sent = (counts >= self.experiment.prototypes.min_cluster_size) & (received.counts >= counts)
        sharpness = gaussian.choose_sharpness(received, features, labels, counts, sums, sent)
        return gaussian.own_classifier(received.sharpened(sharpness), counts, sums, centered)

    def personalize_from(
        self, received: GaussianPool | None, own: Tensors, sharpness: float = 1.0
    ) -> Tensors | None:
        """Return the same classifier from a client's statistics, or from their `scatter_rows`."""
        if received is None:
            return None
        rows = own["rows"] if "rows" in own else gaussian.scatter_rows(own)
        parts = (part.to(received.means) for part in (own["counts"], own["sums"], rows))
        return gaussian.own_classifier(received.sharpened(sharpness), *parts)

    def sharpness_of(self, received: GaussianPool | None, own: Tensors, personal: Tensors) -> float:
        """Return the sharpness that a personalized classifier was made with."""
        if (plain := self.personalize_from(received, own)) is None:
            return 1.0
        weight, found = plain["weight"].double(), personal["weight"].double()
        ratio = float((weight * found).sum() / weight.square().sum().clamp(min=1e-300))
        return min(gaussian.SHARPNESS, key=lambda each: abs(each - ratio))

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


def _classes(totals: Tensors, *, wide: bool) -> Components:
    """Return one Gaussian per class, with the covariance of all samples around class means."""
    size, classes = totals["sums"].shape[1], int((totals["counts"] > 0).sum())
    moment = gaussian.unpack_symmetric(totals["moment"], size)
    around = gaussian.within_from_moment(moment, totals["counts"], totals["sums"])
    degrees = max(1.0, float(totals["counts"].sum()) - classes)
    return fit_classes(Covariance.decompose(around / degrees), degrees, totals, wide=wide)[0]


def _mixture(pool: GaussianPool, groups: ClientMeans) -> Components:
    """Return each class as the mixture of its clients' Gaussians; one if they coincide."""
    if pool.effects.shift or pool.effects.by_class:
        shifts = pool.effects.shifts(groups, pool.means)
        prototypes = pool.effects.group_means(groups, pool.means, shifts)
        labels, shares = groups.labels, groups.counts / pool.counts[groups.labels]
    else:
        labels = pool.counts.nonzero().squeeze(1)
        prototypes, shares = pool.means[labels], torch.ones_like(pool.counts[labels])
    origin = pool.origin
    return gaussian.make_components(
        prototypes,
        pool.covariance.solve(prototypes - origin, pool.shrinkage.weight),
        labels,
        shares,
        origin=origin,
        temperature=pool.shrinkage.temperature,
        num_classes=len(pool.counts),
    )
