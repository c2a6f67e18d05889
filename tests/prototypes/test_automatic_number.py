"""K by itself: as many prototypes as a class has clusters, and never for want of numbers."""

import numpy
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from mpfedcl import cluster_prototypes
from mpfedcl.prototypes import MOST_PROTOTYPES, kmeans_prototypes
from mpfedcl.prototypes.clustering import choose_clusters
from mpfedcl.prototypes.kmeans import group_samples, run_kmeans


def draw_blobs(*sizes: int, distance: float = 12.0, seed: int = 0, dimension: int = 16) -> Tensor:
    """Return normal clouds of deviation 1, their centres on axes of their own."""
    draw = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, dimension, generator=draw) for size in sizes]
    for axis, part in enumerate(parts):
        part[:, axis] += distance
    return torch.cat(parts)


def count(points: Tensor, *, min_cluster_size: int = 1) -> list[int]:
    """Return the counts of one class's prototypes, largest first."""
    labels = torch.zeros(len(points), dtype=torch.int64)
    found = cluster_prototypes(
        points,
        labels,
        num_classes=1,
        num_prototypes="auto",
        min_cluster_size=min_cluster_size,
    )
    assert found.vectors.isfinite().all()
    return [int(each) for each in found.counts]


@pytest.mark.parametrize("sizes", [(30,), (20, 15), (20, 15, 10), (30, 25, 20, 15, 10)])
def test_number_of_prototypes_is_the_number_of_clusters(sizes: tuple[int, ...]) -> None:
    assert count(draw_blobs(*sizes)) == list(sizes)


@pytest.mark.parametrize("size", [10, 40, 300])
@pytest.mark.parametrize("flatness", [0.0, 1.0, 2.0])
def test_one_gaussian_of_any_shape_is_one_cluster(size: int, flatness: float) -> None:
    """Also one that lies in few of its coordinates, which by all of them would be cut up."""
    widths = torch.logspace(0, -flatness, 64)
    cloud = torch.randn(size, 64, generator=torch.Generator().manual_seed(size)) * widths
    assert count(cloud) == [size]
    assert count(1000 + 0.01 * cloud.double()) == [size]


def test_few_or_equal_samples_are_grouped() -> None:
    assert count(torch.ones(1, 3)) == [1]
    assert count(torch.tensor([[0.0], [9.0]])) == [2]
    assert count(torch.ones(7, 3)) == [7]
    assert count(torch.tensor([[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 3)) == [4, 3]
    assert count(torch.zeros(0, 3)) == []


def test_clusters_below_the_minimum_size_are_not_split_off() -> None:
    points = torch.cat([draw_blobs(20), torch.full((1, 16), 40.0)])
    assert count(points) == [21]
    assert count(draw_blobs(20, 5)) == [20, 5]
    assert count(draw_blobs(20, 5), min_cluster_size=6) == [25]


def test_number_of_prototypes_is_bounded() -> None:
    points = torch.eye(2 * MOST_PROTOTYPES).repeat_interleave(4, dim=0)
    assert 1 <= len(count(points)) <= MOST_PROTOTYPES


def test_each_class_and_client_chooses_independently() -> None:
    clients = [torch.cat([draw_blobs(20, 20), draw_blobs(25, seed=1)]), draw_blobs(9, 9, 9)]
    labels = [torch.tensor([0] * 40 + [1] * 25), torch.tensor([1] * 27)]
    found = kmeans_prototypes(clients, labels, [4, 5], num_classes=3, num_prototypes="auto")
    assert [each.labels.tolist() for each in found] == [[0, 0, 1], [1, 1, 1]]
    alone = kmeans_prototypes(clients[1:], labels[1:], [5], num_classes=3, num_prototypes="auto")[0]
    assert torch.equal(alone.vectors, found[1].vectors)


def choose_by_hand(points: Tensor, draws: Tensor) -> int:
    """Write the criterion out for one group, whose clusters are given."""
    spread = PCA().fit(points.numpy()).explained_variance_
    directions, size = spread.sum() ** 2 / (spread**2).sum(), len(points)
    groups = group_samples([points], [torch.zeros(size, dtype=torch.int64)], 1)
    values = []
    for number in range(1, draws.shape[1] + 1):
        clusters = run_kmeans(groups, draws[:, :number], spread=True)
        counts = numpy.bincount(clusters.numpy())
        parts = [points[clusters == k] for k in range(number)]
        squares = sum(float((part - part.mean(0)).square().sum()) for part in parts)
        variance = squares / (directions * (size - number))
        value = (counts * numpy.log(counts / size)).sum()
        value -= size * directions / 2 * numpy.log(variance) + directions * (size - number) / 2
        value -= number * (directions + 1) / 2 * numpy.log(size)
        values.append(value if counts.min() > 1 else -numpy.inf)
    return 1 + int(numpy.argmax(values))


def test_choice_matches_the_criterion() -> None:
    """Clouds that overlap more and less, where the answer is not plain."""
    seen = set()
    for seed in range(12):
        distance = 2.5 + 0.5 * seed
        points = draw_blobs(14, 11, 9, distance=distance, seed=seed, dimension=6).double()
        groups = group_samples([points], [torch.zeros(34, dtype=torch.int64)], 1)
        draws = torch.rand(1, 5, generator=torch.Generator().manual_seed(seed))
        chosen = 1 + int(choose_clusters(groups, draws, spread=True).max())
        assert chosen == choose_by_hand(points, draws)
        seen.add(chosen)
    assert len(seen) > 1
