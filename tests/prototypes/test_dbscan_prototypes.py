"""DBSCAN prototypes: the knee, the noise and the ways out."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import DBSCAN
from sklearn.neighbors import NearestNeighbors

from mpfedcl.prototypes import Prototypes, cluster_prototypes, dbscan_prototypes
from mpfedcl.prototypes.clustering import find_knee, run_dbscan

torch.set_num_threads(1)


def one_class(points: Any, **options: Any) -> Prototypes:
    embeddings = torch.as_tensor(points, dtype=torch.float64)
    if embeddings.dim() == 1:
        embeddings = embeddings.unsqueeze(1)
    labels = torch.zeros(len(embeddings), dtype=torch.int64)
    return cluster_prototypes(embeddings, labels, num_classes=1, method="dbscan", **options)


@pytest.mark.parametrize(
    ("curve", "knee"),
    [
        ([0.0, 0.0, 0.0, 10.0], 0.0),
        ([1.0, 1.0, 1.5, 10.0], 1.5),  # chord 1 4 7 10: gaps 0 3 5.5 0
        ([1.0, 2.0, 3.0], 1.0),  # a straight line has its first point
        ([10.0, 1.0, 1.5, 1.0], 1.5),  # order does not matter
        ([0.0, 9.0, 10.0, 10.0], 9.0),  # above the chord counts as well
        ([2.0], 2.0),
    ],
)
def test_knee_is_farthest_from_the_chord(curve: list[float], knee: float) -> None:
    assert find_knee(torch.tensor(curve)) == knee


def test_two_clusters_and_noise_match_hand_computed_means() -> None:
    # Third neighbors, self included: 1 .5 .5 1 | .2 .1 .1 .2 | the stray 30 - 20.3 = 9.7 and more.
    points = [0.0, 0.5, 1.0, 1.5, 20.0, 20.1, 20.2, 20.3, 30.0]
    found = one_class(points)
    # The knee is 1, so each heap is a cluster, and 30 joins the heap around 20.
    np.testing.assert_allclose(found.vectors.flatten(), [(80.6 + 30) / 5, 0.75])
    assert found.counts.tolist() == [5, 4]


def test_given_radius_overrides_the_knee() -> None:
    points = [0.0, 0.5, 1.0, 1.5, 20.0, 20.1, 20.2, 20.3, 30.0]
    assert one_class(points, eps=100.0).counts.tolist() == [9]
    # Only the heap around 20 is dense enough; all else joins it.
    assert one_class(points, eps=0.15).counts.tolist() == [9]
    assert one_class(points, eps=0.6).counts.tolist() == [5, 4]


def test_noise_joins_by_the_mean_of_the_cluster_not_by_its_nearest_point() -> None:
    # A long cluster 0..10 (mean 5) and a short one at 21 (mean 21): 13.5 is nearer to the point 10
    # (3.5 against 7) but as for means 8.5 against 7.5 away.
    points = [*np.arange(0, 10.5, 0.5), 20.5, 21.0, 21.5, 13.5]
    clusters = run_dbscan(torch.tensor(points).unsqueeze(1), eps=0.6, min_samples=3)
    assert clusters.tolist() == [0] * 21 + [1] * 4


@pytest.mark.parametrize(
    ("points", "options"),
    [
        ([1.0], {}),
        ([1.0, 2.0, 9.0], {}),  # n <= 3
        ([1.0, 2.0, 9.0], {"eps": 0.1}),
        ([4.0] * 10, {}),  # radius 0
        ([4.0] * 9 + [5.0], {}),  # most are equal: the knee is 0
        ([1.0, 2.0, 4.0, 8.0, 16.0], {"eps": 0.01}),  # no cluster
        ([1.0, 2.0, 4.0, 8.0, 16.0], {"min_samples": 5}),
        ([1.0, 2.0, 4.0, 8.0, 16.0], {"min_samples": 1}),  # each is its own first neighbor
    ],
)
def test_class_without_clusters_gives_its_mean(points: list[float], options: Any) -> None:
    found = one_class(points, **options)
    assert found.vectors.flatten().tolist() == pytest.approx([np.mean(points)])
    assert found.counts.tolist() == [len(points)]


@pytest.mark.parametrize("seed", range(8))
def test_result_agrees_with_scikit_learn(seed: int) -> None:
    generator = np.random.default_rng(seed)
    middles = generator.uniform(-20, 20, (3, 4))
    points = np.concatenate(
        [middle + generator.normal(size=(20, 4)) for middle in middles]
        + [generator.uniform(-30, 30, (6, 4))]
    )
    third = np.sort(NearestNeighbors(n_neighbors=3).fit(points).kneighbors(points)[0][:, 2])
    ends = np.array([[0, third[0]], [len(third) - 1, third[-1]]])
    along = (ends[1] - ends[0]) / np.linalg.norm(ends[1] - ends[0])
    away = np.stack([np.arange(len(third)), third], axis=1) - ends[0]
    eps = third[np.argmax(np.abs(away[:, 0] * along[1] - away[:, 1] * along[0]))]
    # A hair more, as they and we round the distances that equal the radius differently.
    clusters = DBSCAN(eps=eps * (1 + 1e-9), min_samples=3).fit_predict(points)
    assert clusters.max() >= 1
    means = np.stack([points[clusters == k].mean(0) for k in range(clusters.max() + 1)])
    for sample in np.flatnonzero(clusters == -1):
        clusters[sample] = np.linalg.norm(means - points[sample], axis=1).argmin()
    expected = {
        (int((clusters == k).sum()), *np.round(points[clusters == k].mean(0), 6))
        for k in range(len(means))
    }
    found = one_class(points)
    assert expected == {
        (int(count), *np.round(vector.numpy(), 6))
        for vector, count in zip(found.vectors, found.counts, strict=True)
    }
    assert found.counts.tolist() == sorted(found.counts.tolist(), reverse=True)


def test_batch_matches_single_clients_and_small_clusters_are_dropped() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.rand(size, 3, generator=generator) for size in (40, 0, 25)]
    labels = [torch.randint(0, 2, (len(points),), generator=generator) for points in embeddings]
    together = dbscan_prototypes(embeddings, labels, num_classes=2)
    for found, points, classes in zip(together, embeddings, labels, strict=True):
        alone = cluster_prototypes(points, classes, num_classes=2, method="dbscan")
        assert torch.equal(found.vectors, alone.vectors)
        assert torch.equal(found.counts, alone.counts)
        assert found.counts.sum() == len(points)
    large = dbscan_prototypes(embeddings, labels, num_classes=2, min_cluster_size=10)
    assert all((found.counts >= 10).all() for found in large)
    assert dbscan_prototypes([], [], num_classes=2) == []
