"""Estimates of how clients differ: a shift of all samples of a client, and effects on classes."""

from typing import NamedTuple

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian.statistics import effect_totals
from mpfedcl.prototypes import PrototypePool


class ClientMeans(NamedTuple):
    """The class means of all clients: a group is one client's samples of one class."""

    vectors: Tensor
    """[G, d], float64."""
    labels: Tensor
    """[G]."""
    counts: Tensor
    """[G], float64: n_ic."""
    owners: Tensor
    """[G], indices of clients."""
    num_clients: int
    num_classes: int

    @classmethod
    def of_pool(cls, pool: PrototypePool) -> "ClientMeans":
        """Return the groups of a pool with one mean per client and class."""
        vectors, counts = pool.vectors.double(), pool.counts.double()
        return cls(vectors, pool.labels, counts, pool.owners, pool.num_clients, pool.num_classes)

    def by_class(self, values: Tensor) -> Tensor:
        """Sum one value or vector per group over each class."""
        return _add_up(values, self.labels, self.num_classes)

    def by_client(self, values: Tensor) -> Tensor:
        """Sum one value or vector per group over each client."""
        return _add_up(values, self.owners, self.num_clients)

    @property
    def class_counts(self) -> Tensor:
        """Return n_c [C]."""
        return self.by_class(self.counts)

    @property
    def class_means(self) -> Tensor:
        """Return mu_c [C, d]; zeros for a class that no client holds."""
        sums = self.by_class(self.counts.unsqueeze(1) * self.vectors)
        return sums / self.class_counts.clamp(min=1).unsqueeze(1)

    @property
    def degrees(self) -> Tensor:
        """Return f_i [N]: a client's samples minus the classes that it holds."""
        return self.by_client(self.counts - 1)

    def totals(self) -> Tensors:
        """Return what the clients would add up to under secure aggregation, without moments."""
        sums = self.counts.unsqueeze(1) * self.vectors
        places = (self.owners, self.labels)
        counts = self.counts.new_zeros(self.num_clients, self.num_classes)
        return {
            "counts": self.class_counts,
            "sums": self.by_class(sums),
            "groups": self.by_class(torch.ones_like(self.counts)),
            "squares": self.by_class((sums * self.vectors).sum(1)),
            "counts_squared": self.by_class(self.counts.square()),
            **effect_totals(counts.index_put(places, self.counts), self.by_client(sums)),
        }


class ClientEffects(NamedTuple):
    """The variances of the differences between clients, in units of tr(S)."""

    shift: float
    """t_b: of the shift that is common to all samples of a client, such as that of a camera."""
    by_class: float
    """t_e: of the shift of each single class."""

    def shifts(self, groups: ClientMeans, means: Tensor) -> Tensor:
        """Return b_i [N, d], the best linear prediction of each client's shift."""
        weights = self._weights(groups)
        pulled = groups.by_client(weights.unsqueeze(1) * (groups.vectors - means[groups.labels]))
        total = groups.by_client(weights)
        return self.shift * pulled / (1 + self.shift * total).unsqueeze(1)

    def group_means(self, groups: ClientMeans, means: Tensor, shifts: Tensor) -> Tensor:
        """Return m_ic [G, d] = mu_c + b_i + t_e v_ic (E_ic - b_i), the prototype of each group."""
        expected = means[groups.labels] + shifts[groups.owners]
        trust = (self.by_class * self._weights(groups)).unsqueeze(1)
        return expected + trust * (groups.vectors - expected)

    def _weights(self, groups: ClientMeans) -> Tensor:
        """Return v_ic [G] = 1 / (t_e + 1/n_ic)."""
        return 1 / (self.by_class + 1 / groups.counts)


def estimate_effects(totals: Tensors, means: Tensor, trace: float) -> ClientEffects:
    """Estimate both variances from the means E_ic by the method of moments.

    Args:
        totals: In float64.
        means: mu_c [C, d], zeros for a class that no client holds.
        trace: tr(S).

    Without an effect, means E_ic of n_ic samples around mu_c have squares tr(S)/n_ic. The
    excess of these is t_b + t_e, and the excess of the clients' averages of them determines t_b.
    """
    counts = totals["counts"]
    held = counts.clamp(min=1)
    room = float(counts.sum() - (totals["counts_squared"] / held).sum())
    if not trace or room <= 1e-9 * float(counts.sum()):
        return ClientEffects(0.0, 0.0)
    around = totals["squares"].sum() - (totals["sums"].square().sum(1) / held).sum()
    spare = float(totals["groups"].sum() - (counts > 0).sum())
    total = max(0.0, float(around) / trace - spare) / room
    shared = totals["shared_pairs"]
    between = (
        totals["lengths"]
        - 2 * (means * totals["shared_sums"]).sum()
        + (means @ means.T * shared).sum()
    )
    own = shared.diagonal()
    from_effect = own * (1 + totals["counts_squared"] / held**2) - 2 * totals["cubes"] / held
    from_noise = totals["clients"] - (own / held).sum()
    from_shift = (
        counts.sum()
        - 2 * (totals["counts_squared"] / held).sum()
        + (shared * totals["pairs"] / torch.outer(held, held)).sum()
    )
    noise, effect, exposure = float(from_noise), float(from_effect.sum()), float(from_shift)
    return _split(total, float(between) / trace - noise, effect, exposure, float(counts.sum()))


def _split(
    total: float, excess: float, from_effect: float, from_shift: float, num_samples: float
) -> ClientEffects:
    """Split t_b + t_e by the excess of the clients' averages and what each effect adds to it."""
    gap = from_shift - from_effect
    if abs(gap) <= 1e-9 * num_samples:
        # Clients of one class each: a shift and an effect on the class are the same.
        return ClientEffects(0.0, total)
    shift = min(max((excess - total * from_effect) / gap, 0.0), total)
    return ClientEffects(shift, total - shift)


def _add_up(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size, *values.shape[1:]).index_add_(0, index, values)
