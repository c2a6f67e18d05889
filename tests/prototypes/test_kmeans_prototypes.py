"""k-means prototypes: by hand, against scikit-learn, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from kmeans_cases import one_class
from sklearn.cluster import KMeans
from torch import Tensor

from mpfedcl.prototypes import Prototypes, cluster_prototypes, kmeans_prototypes, mean_prototypes

torch.set_num_threads(1)


def inertia(points: Tensor, centres: Tensor) -> float:
    return float(torch.cdist(points, centres).min(dim=1).values.square().sum())


# --- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["k-means++", "random"])
@pytest.mark.parametrize("seed", range(5))
def test_separate_clusters_give_their_means_largest_first(init: Any, seed: int) -> None:
    found = one_class([[0, 0], [0, 1], [10, 0], [10, 1], [10, 2]], 2, init=init, seed=seed)
    assert found.vectors.tolist() == [[10, 1], [0, 0.5]]
    assert found.counts.tolist() == [3, 2]
    assert found.labels.tolist() == [0, 0]
    assert len(found) == 2


@pytest.mark.parametrize("seed", range(5))
def test_equal_counts_are_ordered_by_the_lowest_member(seed: int) -> None:
    found = one_class([[7.0], [1.0], [1.0], [7.0], [4.0], [4.0]], 3, seed=seed)
    assert found.vectors.flatten().tolist() == [7, 1, 4]
    assert found.counts.tolist() == [2, 2, 2]


def test_classes_are_sorted_and_absent_ones_left_out() -> None:
    embeddings = torch.tensor([[5.0], [1.0], [9.0], [1.5]])
    found = cluster_prototypes(
        embeddings, torch.tensor([3, 1, 3, 1]), num_classes=6, num_prototypes=1
    )
    assert found.labels.tolist() == [1, 3]
    assert found.vectors.flatten().tolist() == [1.25, 7.0]
    assert found.counts.tolist() == [2, 2]


def test_class_with_fewer_samples_than_prototypes_keeps_distinct_points() -> None:
    found = one_class([[2.0, 0], [1.0, 0], [2.0, 0]], 5)
    assert found.vectors.tolist() == [[2, 0], [1, 0]]
    assert found.counts.tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_samples", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_identical_points_give_exactly_that_point(
    dtype: torch.dtype, num_samples: int, init: Any
) -> None:
    point = torch.tensor([0.1, -0.7, 1e-3], dtype=dtype)
    found = one_class(point.expand(num_samples, 3), 4, init=init, dtype=dtype)
    assert torch.equal(found.vectors, point.unsqueeze(0))
    assert found.counts.tolist() == [num_samples]


def test_min_cluster_size_drops_small_clusters() -> None:
    points = [[0.0], [0.5], [100.0]]
    assert one_class(points, 2, min_cluster_size=1).counts.tolist() == [2, 1]
    kept = one_class(points, 2, min_cluster_size=2)
    assert kept.vectors.tolist() == [[0.25]]
    assert len(one_class(points, 2, min_cluster_size=3)) == 0
    labels = [torch.tensor([0, 0, 1])]
    means = mean_prototypes([torch.tensor(points)], labels, num_classes=2, min_cluster_size=2)
    assert means[0].labels.tolist() == [0]


def test_mean_gives_one_prototype_per_class() -> None:
    embeddings = torch.tensor([[0.0, 2.0], [4.0, 0.0], [1.0, 1.0]])
    found = cluster_prototypes(
        embeddings, torch.tensor([1, 1, 0]), num_classes=2, method="mean", num_prototypes=4
    )
    assert found.vectors.tolist() == [[1, 1], [2, 1]]
    assert found.counts.tolist() == [1, 2]


@pytest.mark.parametrize("method", ["kmeans", "mean", "dbscan"])
def test_no_samples_give_no_prototypes(method: Any) -> None:
    found = cluster_prototypes(
        torch.zeros(0, 7, dtype=torch.float64),
        torch.zeros(0, dtype=torch.int64),
        num_classes=3,
        num_prototypes=2,
        method=method,
    )
    assert found.vectors.shape == (0, 7)
    assert found.vectors.dtype == torch.float64
    assert len(found) == len(found.labels) == len(found.counts) == 0


def test_empty_prototypes_have_a_dimension() -> None:
    empty = Prototypes.empty(5, torch.float64, "cpu")
    assert (len(empty), empty.dimension, empty.vectors.dtype) == (0, 5, torch.float64)
    with pytest.raises(ValueError, match=r"int64 of shape \[0\]"):
        Prototypes(torch.zeros(0, 2), torch.zeros(1, dtype=torch.int64), empty.counts)
    with pytest.raises(ValueError, match=r"must be \[M, d\]"):
        Prototypes(torch.zeros(0), empty.labels, empty.counts)


def test_client_without_samples_has_no_prototypes() -> None:
    embeddings = [torch.ones(2, 3), torch.zeros(0, 3), torch.zeros(1, 3)]
    labels = [torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    found = kmeans_prototypes(embeddings, labels, [0, 1, 2], num_classes=2, num_prototypes=2)
    assert [len(prototypes) for prototypes in found] == [1, 0, 1]
    assert kmeans_prototypes([], [], [], num_classes=2, num_prototypes=2) == []
    assert mean_prototypes([], [], num_classes=2) == []


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 1])}, "embeddings have shape"),
        ({"labels": torch.tensor([[0], [1], [1]])}, "embeddings have shape"),
        ({"embeddings": torch.zeros(3)}, "embeddings have shape"),
        ({"labels": torch.tensor([0, 1, 2])}, "label 2 is out of range"),
        ({"labels": torch.tensor([0, -1, 1])}, "label -1 is out of range"),
        ({"labels": torch.tensor([0.0, 1.0, 1.0])}, "must be integers"),
        ({"embeddings": torch.zeros(3, 2, dtype=torch.int64)}, "float32 or float64"),
        ({"embeddings": torch.tensor([[0.0], [torch.nan], [1.0]])}, "NaN or infinity"),
        ({"embeddings": torch.tensor([[0.0], [-torch.inf], [1.0]])}, "NaN or infinity"),
        ({"embeddings": torch.full((3, 1), 1e30)}, "must stay below"),
        ({"num_prototypes": 0}, "num_prototypes is 0"),
        ({"num_prototypes": None}, "num_prototypes is None"),
        ({"num_prototypes": -1, "method": "dbscan"}, "num_prototypes is -1"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"method": "ward"}, "method is 'ward'"),
        ({"init": "best"}, "init is 'best'"),
        ({"min_cluster_size": 0}, "min_cluster_size is 0"),
        ({"method": "dbscan", "eps": 0.0}, "eps is 0.0"),
        ({"method": "dbscan", "min_samples": 0}, "min_samples is 0"),
    ],
)
def test_invalid_input_is_rejected_with_one_sentence(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "embeddings": torch.zeros(3, 2),
        "labels": torch.tensor([0, 1, 1]),
        "num_classes": 2,
        "num_prototypes": 2,
    } | change
    with pytest.raises(ValueError, match=message) as error:
        cluster_prototypes(given.pop("embeddings"), given.pop("labels"), **given)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_clients_of_different_dimensions_are_rejected() -> None:
    label = torch.tensor([0])
    with pytest.raises(ValueError, match="they must agree"):
        kmeans_prototypes(
            [torch.zeros(1, 2), torch.zeros(1, 3)],
            [label, label],
            [0, 0],
            num_classes=1,
            num_prototypes=1,
        )
    with pytest.raises(ValueError, match="1 seeds for 2 clients"):
        kmeans_prototypes(
            [torch.zeros(1, 2)] * 2, [label] * 2, [0], num_classes=1, num_prototypes=1
        )
    with pytest.raises(ValueError, match="labels of 1"):
        mean_prototypes([torch.zeros(1, 2)] * 2, [label], num_classes=1)


# --- against scikit-learn ----------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [15, 16, 17, 33, 150])
@pytest.mark.parametrize("num_prototypes", [2, 3, 7])
@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_scikit_learn_started_at_our_centroids_stays_there(
    num_samples: int, num_prototypes: int, init: Any
) -> None:
    points = torch.rand(num_samples, 4, dtype=torch.float64, generator=torch.Generator())
    found = one_class(points, num_prototypes, init=init, seed=3)
    assert len(found) == num_prototypes
    theirs = KMeans(num_prototypes, init=found.vectors.numpy(), n_init=1, tol=0).fit(points.numpy())
    np.testing.assert_allclose(theirs.cluster_centers_, found.vectors.numpy(), atol=1e-12)
    assert np.bincount(theirs.labels_).tolist() == found.counts.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_well_separated_blobs_are_found_as_scikit_learn_finds_them(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    middles = 1000 * torch.eye(4, 8, dtype=torch.float64)
    points = middles.repeat(30, 1)
    points += torch.randn(points.shape, dtype=torch.float64, generator=generator)
    ours = inertia(points, one_class(points, 4, seed=seed).vectors)
    theirs = KMeans(4, n_init=10, random_state=0).fit(points.numpy()).inertia_
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_best_of_ten_seeds_is_near_scikit_learn_on_uniform_data() -> None:
    points = torch.rand(120, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theirs = KMeans(4, n_init=10, random_state=0).fit(points.numpy()).inertia_
    for init in ("k-means++", "random"):
        ours = [inertia(points, one_class(points, 4, seed=s, init=init).vectors) for s in range(10)]
        assert theirs * 0.98 < min(ours) < theirs * 1.02
        assert max(ours) < theirs * 1.15
        assert len(set(ours)) > 1  # the seed matters
