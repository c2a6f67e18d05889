"""Rules that weigh updates by their distances from each other; all clients count alike."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.rounds.aggregation.base import RuleOverAll

_FARTHEST = 1e6
"""Multiple of the median distance beyond which an update is left out."""
_MOST_STEPS = 100
_SMOOTHING = 1e-6
"""Of the median distance between updates: what a distance counts as where it is less."""
_PRECISION = 1e-10
_CLIPPING_STEPS = 3


class RuleByDistances(RuleOverAll):
    """A rule that combines updates by weights that depend on their distances only.

    It works on the distances [n, n], so that models are never stacked.
    """

    @abstractmethod
    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return the weight of each update [n], float64; they sum to 1."""

    def combine(self, updates: Sequence[Tensors], attackers: int) -> Tensors:
        """Return the combination."""
        squares = squared_distances(updates)
        near = _find_near(squares)
        updates = [updates[place] for place in near]
        shares = self.shares(squares[near][:, near], min(attackers, self.most_attackers(len(near))))
        # An update that is left out must not count, even if it holds NaN.
        kept = [(each, float(share)) for each, share in zip(updates, shares, strict=True) if share]
        return {
            name: sum((share * each[name] for each, share in kept), torch.zeros_like(value))
            for name, value in updates[0].items()
        }


class Krum(RuleByDistances):
    """argmin_i Σ |x_i - x_j|² over the n - f - 2 updates x_j that are nearest to x_i.

    With f attackers it needs more than 2f + 2 updates. One client's model is the new one.
    """

    @classmethod
    def most_attackers(cls, count: int) -> int:
        """n > 2f + 2."""
        return (count - 3) // 2

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return 1 for the chosen one; of equal scores the first by name."""
        scores = krum_scores(squared_distances, attackers)
        return torch.nn.functional.one_hot(scores.argmin(), len(scores)).to(scores)


class MultiKrum(Krum):
    """The mean of the n - f updates with the best scores of Krum; it needs as many as Krum."""

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return equal shares of the chosen ones; of equal scores the first by name."""
        scores = krum_scores(squared_distances, attackers)
        chosen = scores.sort(stable=True).indices[: len(scores) - attackers]
        shares = torch.zeros_like(scores)
        shares[chosen] = 1 / len(chosen)
        return shares


class GeometricMedian(RuleByDistances):
    """argmin_z Σ |x_i - z| by Weiszfeld's algorithm, smoothed: z = Σ x_i / |x_i - z|, normalized.

    Fewer than half of the updates cannot move it far, whatever they are.
    """

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return the shares at which the algorithm stands still."""
        return weiszfeld(squared_distances)


def weiszfeld(squared_distances: Tensor) -> Tensor:
    """Return the shares [n] of points in their geometric median, from their distances [n, n]."""
    count = len(squared_distances)
    shares = squared_distances.new_full((count,), 1 / count)
    apart = squared_distances[squared_distances > 0]
    if not len(apart):
        return shares
    least = _SMOOTHING * float(apart.median().sqrt())
    for _ in range(_MOST_STEPS):
        closeness = 1 / distances_to(shares, squared_distances).clamp(min=least)
        following = closeness / closeness.sum()
        moved = float((following - shares).abs().max())
        shares = following
        if moved < _PRECISION:
            break
    return shares


class CenteredClipping(RuleByDistances):
    """v <- v + 1/n Σ (x_i - v) min(1, r / |x_i - v|), thrice.

    The radius r is the median of the distances to v, taken again in each step, so that it fits
    every model and round. The first v is the update with the least median distance to the others:
    the paper's, the round before, needs momentum at the clients.
    """

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return the shares after the last step."""
        count = len(squared_distances)
        first = squared_distances.median(dim=1).values.argmin()
        shares = torch.nn.functional.one_hot(first, count).to(squared_distances)
        for _ in range(_CLIPPING_STEPS):
            distances = distances_to(shares, squared_distances)
            radius = distances.quantile(0.5)
            scales = (radius / distances).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1)
            shares = shares * (1 - scales.mean()) + scales / count
        return shares


def krum_scores(squared_distances: Tensor, attackers: int) -> Tensor:
    """Return each update's sum over its n - f - 2 nearest others [n]."""
    count = len(squared_distances)
    others = squared_distances + torch.diag(squared_distances.new_full((count,), torch.inf))
    return others.sort(dim=1).values[:, : count - attackers - 2].sum(1)


def squared_distances(updates: Sequence[Tensors]) -> Tensor:
    """Return |x_i - x_j|² over all tensors [n, n], float64."""
    device = next((value.device for value in updates[0].values()), torch.device("cpu"))
    found = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=device)
    for i, one in enumerate(updates):
        for j, other in enumerate(updates[:i]):
            squares = [(one[n] - other[n]).square().sum(dtype=torch.float64) for n in one]
            found[i, j] = found[j, i] = sum(squares, found.new_zeros(()))
    return found


def _find_near(squared_distances: Tensor) -> list[int]:
    """Return the updates without extreme outliers, which spoil the precision of distances."""
    typical = squared_distances.median(dim=1).values
    return (typical <= _FARTHEST**2 * typical.median()).nonzero().squeeze(1).tolist()


def distances_to(shares: Tensor, squared_distances: Tensor) -> Tensor:
    """Return |x_i - z| [n] of z = Σ_j shares_j x_j, shares that sum to 1.

    |x_i - z|² = Σ_j s_j D_ij - ½ Σ_jk s_j s_k D_jk.
    """
    weighted = squared_distances @ shares
    return (weighted - shares @ weighted / 2).clamp(min=0).sqrt()
