"""DBSCAN of one class of one client, with a neighborhood radius that the data choose."""

import torch
from torch import Tensor


def find_knee(distances: Tensor) -> float:
    """Return the value at the knee of a rising curve: the point farthest from its chord.

    With d_0 ≤ … ≤ d_{n-1} and the chord c_i = d_0 + i (d_{n-1} - d_0) / (n - 1), it is d_i for the
    lowest i that maximizes |d_i - c_i|; the distance measured across the chord is the same up to a
    constant factor.
    """
    curve = distances.cpu().double().sort().values
    chord = torch.linspace(0, 1, len(curve), dtype=curve.dtype)
    gap = (curve - (curve[0] + chord * (curve[-1] - curve[0]))).abs()
    return float(curve[gap.argmax()])


def run_dbscan(points: Tensor, *, eps: float | None, min_samples: int) -> Tensor:
    """Return the cluster [n] of each of one group's points, from 0, with no noise left.

    `eps` is the neighborhood radius; None takes the knee of the sorted distances to the
    `min_samples`-th neighbor, the point itself being the first. Noise joins the cluster whose mean
    of core and border points is nearest (ties to the lowest). Too few points, a radius of 0 or no
    cluster at all leave one cluster, and its mean is the class mean.
    """
    together = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    if len(points) <= min_samples:
        return together
    # From differences: equal points are at distance 0, which a product would blur.
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    if eps is None:
        eps = find_knee(distances.kthvalue(min_samples, dim=1).values)
    if eps == 0:
        return together

    from sklearn.cluster import DBSCAN  # a second to import, and only this method needs it

    model = DBSCAN(eps=eps, min_samples=min_samples, metric="precomputed")
    found = torch.from_numpy(model.fit_predict(distances.cpu().numpy())).to(together)
    num_clusters = int(found.max()) + 1
    noise = found < 0
    if num_clusters == 0:
        return together
    means = torch.stack([points[found == k].mean(0) for k in range(num_clusters)])
    found[noise] = torch.cdist(
        points[noise], means, compute_mode="donot_use_mm_for_euclid_dist"
    ).argmin(1)
    return found
