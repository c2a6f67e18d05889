"""the point with the smallest sum of distances to the updates (RFA, Pillutla et al., 2022)."""

from torch import Tensor

from mpfedcl.rounds.aggregation.base import RuleByDistances, distances_to

_MOST_STEPS = 100
_SMOOTHING = 1e-6
"""Of the median distance between updates: what a distance counts as where it is less."""
_PRECISION = 1e-10


class GeometricMedian(RuleByDistances):
    """argmin_z Σ |x_i - z| by Weiszfeld's algorithm, smoothed: z = Σ x_i / |x_i - z|, normalized.

    Fewer than half of the updates cannot move it far, whatever they are. All clients count alike.
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
