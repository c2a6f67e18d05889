"""k-means prototypes: by hand, against scikit-learn, and as properties."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor

from mpfedcl.prototypes import Prototypes, cluster_clients, cluster_prototypes, mean_clients
from mpfedcl.prototypes.groups import average_clusters, group_samples
from mpfedcl.prototypes.kmeans import _Blocks, _choose_centres, _draw_rows, _iterate

torch.set_num_threads(1)
quick = settings(deadline=None, max_examples=60)


def one_class(points: Any, num_prototypes: int, **options: Any) -> Prototypes:
    embeddings = torch.as_tensor(points, dtype=options.pop("dtype", torch.float64))
    labels = torch.zeros(len(embeddings), dtype=torch.int64)
    return cluster_prototypes(
        embeddings, labels, num_classes=1, num_prototypes=num_prototypes, **options
    )


def inertia(points: Tensor, centres: Tensor) -> float:
    return float(torch.cdist(points, centres).min(dim=1).values.square().sum())


def assert_same(left: Prototypes, right: Prototypes, tolerance: float | None = None) -> None:
    assert torch.equal(left.labels, right.labels)
    assert torch.equal(left.counts, right.counts)
    torch.testing.assert_close(left.vectors, right.vectors, rtol=tolerance, atol=tolerance)


# --- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["k-means++", "random"])
@pytest.mark.parametrize("seed", range(5))
def test_two_separate_heaps_give_their_means_largest_first(init: Any, seed: int) -> None:
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


def test_a_class_with_fewer_samples_than_prototypes_sends_each_distinct_point_once() -> None:
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
    means = mean_clients([torch.tensor(points)], labels, num_classes=2, min_cluster_size=2)
    assert means[0].labels.tolist() == [0]


def test_mean_is_one_prototype_a_class() -> None:
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


def test_empty_prototypes_know_their_dimension() -> None:
    empty = Prototypes.empty(5, torch.float64, "cpu")
    assert (len(empty), empty.dimension, empty.vectors.dtype) == (0, 5, torch.float64)
    with pytest.raises(ValueError, match=r"int64 of shape \[0\]"):
        Prototypes(torch.zeros(0, 2), torch.zeros(1, dtype=torch.int64), empty.counts)
    with pytest.raises(ValueError, match=r"must be \[M, d\]"):
        Prototypes(torch.zeros(0), empty.labels, empty.counts)


def test_a_client_without_samples_stands_between_others() -> None:
    embeddings = [torch.ones(2, 3), torch.zeros(0, 3), torch.zeros(1, 3)]
    labels = [torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    found = cluster_clients(embeddings, labels, [0, 1, 2], num_classes=2, num_prototypes=2)
    assert [len(prototypes) for prototypes in found] == [1, 0, 1]
    assert cluster_clients([], [], [], num_classes=2, num_prototypes=2) == []
    assert mean_clients([], [], num_classes=2) == []


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
def test_what_cannot_be_clustered_is_refused_in_one_sentence(
    change: dict[str, Any], message: str
) -> None:
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


def test_clients_that_do_not_fit_together_are_refused() -> None:
    label = torch.tensor([0])
    with pytest.raises(ValueError, match="they must agree"):
        cluster_clients(
            [torch.zeros(1, 2), torch.zeros(1, 3)],
            [label, label],
            [0, 0],
            num_classes=1,
            num_prototypes=1,
        )
    with pytest.raises(ValueError, match="1 seeds for 2 clients"):
        cluster_clients([torch.zeros(1, 2)] * 2, [label] * 2, [0], num_classes=1, num_prototypes=1)
    with pytest.raises(ValueError, match="labels of 1"):
        mean_clients([torch.zeros(1, 2)] * 2, [label], num_classes=1)


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


def test_without_structure_the_best_of_a_few_seeds_comes_near_scikit_learn() -> None:
    points = torch.rand(120, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theirs = KMeans(4, n_init=10, random_state=0).fit(points.numpy()).inertia_
    for init in ("k-means++", "random"):
        ours = [inertia(points, one_class(points, 4, seed=s, init=init).vectors) for s in range(10)]
        assert theirs * 0.98 < min(ours) < theirs * 1.02
        assert max(ours) < theirs * 1.15
        assert len(set(ours)) > 1  # the seed matters


# --- numbers that are hard on k-means ----------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_large_common_offset_does_not_blur_the_clusters(seed: int) -> None:
    # In float32 the squares are near 1e10 and the gaps 1e-2: products alone could not tell them.
    offset = torch.full((64,), 16384.0)
    low = offset.repeat(20, 1)
    high = offset.repeat(12, 1)
    low[:, 0] += torch.arange(20) / 512
    high[:, 0] += 4 + torch.arange(12) / 512
    found = one_class(torch.cat([high, low]), 2, seed=seed, dtype=torch.float32)
    assert found.counts.tolist() == [20, 12]


def test_a_clients_scale_does_not_disturb_another() -> None:
    generator = torch.Generator().manual_seed(0)
    small = 1e-6 * torch.rand(50, 3, generator=generator)
    large = 1e12 * torch.rand(50, 3, generator=generator)
    labels = torch.arange(50) % 2
    options: dict[str, Any] = {"num_classes": 2, "num_prototypes": 3}
    together = cluster_clients([large, small, large], [labels] * 3, [4, 5, 6], **options)
    assert_same(together[1], cluster_prototypes(small, labels, seed=5, **options))
    assert together[1].counts.sum() == 50
    assert len(together[1]) == 6


def one_block(*values: float) -> _Blocks:
    """A group of points on a line; the last one pads its block, as `run_kmeans` has it."""
    line = torch.tensor([*values, *[values[-1]] * (16 - len(values))], dtype=torch.float32)
    points = line.view(1, 16, 1)
    mask = torch.arange(16).unsqueeze(0) < len(values)
    return _Blocks(points, mask, torch.zeros(1, dtype=torch.int64), 1)


def test_an_empty_cluster_moves_to_the_farthest_point() -> None:
    start = torch.zeros(1, 16, dtype=torch.int64)
    assert _iterate(one_block(100, 101, 140, 102), start, 2)[0, :4].tolist() == [0, 0, 1, 0]
    # Two are empty: they are refilled one after the other.
    found = _iterate(one_block(100, 101, 140, 102, 170), start, 3)[0, :5]
    assert found.tolist() == [0, 0, 2, 0, 1]
    # Nothing to move to: the spare clusters stay empty, and nothing becomes NaN.
    assert _iterate(one_block(7, 7, 7), start, 3).tolist() == start.tolist()


@pytest.mark.parametrize(
    ("spread", "draw", "nearest"),
    [
        # The first centre is 0, so D² is 1 and 100: the second is 1 with probability 1/101.
        (True, 0.0098, [0, 1, 1]),
        (True, 0.01, [0, 0, 1]),
        (False, 0.49, [0, 1, 1]),
        (False, 0.51, [0, 0, 1]),
    ],
)
def test_centres_are_drawn_as_promised(spread: bool, draw: float, nearest: list[int]) -> None:
    blocks = one_block(0, 1, 10)
    draws = torch.tensor([[0.3, draw]])
    clusters, unsolved, _ = _choose_centres(blocks, torch.tensor([3]), draws, spread=spread)
    assert clusters[0, :3].tolist() == nearest
    assert unsolved.tolist() == [True]


def test_between_two_centres_the_first_one_wins() -> None:
    blocks = one_block(-1, 0, 1)
    draws = torch.tensor([[0.0, 0.9]])
    clusters, _, middle = _choose_centres(blocks, torch.tensor([3]), draws, spread=True)
    assert clusters[0, :3].tolist() == [0, 0, 1]
    assert middle.tolist() == [[0]]


def test_clusters_with_the_same_mean_become_one() -> None:
    points = torch.tensor([[-1.0], [1.0], [0.0], [5.0]])
    groups = group_samples([points], [torch.zeros(4, dtype=torch.int64)], 1)
    found = average_clusters(groups, torch.tensor([1, 1, 2, 0]), 3, 1)[0]
    assert found.vectors.flatten().tolist() == [0, 5]
    assert found.counts.tolist() == [3, 1]


def test_rows_are_drawn_in_proportion_to_their_weight() -> None:
    weight = torch.zeros(2, 16, dtype=torch.float64)
    weight[0, [3, 5]] = torch.tensor([1.0, 3.0], dtype=torch.float64)
    weight[1, 4] = 1e-200
    group = torch.tensor([0, 1])
    begin, end = torch.tensor([0, 16]), torch.tensor([15, 31])
    for draw, row in ((0.0, 3), (0.2499, 3), (0.25, 5), (1 - 2**-24, 5)):
        draws = torch.tensor([draw, draw])
        drawn = _draw_rows(weight, weight.sum(1), draws, group, begin, end)
        assert drawn.tolist() == [row, 20]


def test_embeddings_are_taken_as_constants_and_labels_of_any_integer_type() -> None:
    embeddings = torch.rand(9, 2, requires_grad=True)
    before = embeddings.detach().clone()
    labels = torch.arange(9, dtype=torch.uint8) % 2
    found = cluster_prototypes(embeddings, labels, num_classes=2, num_prototypes=2)
    assert not found.vectors.requires_grad
    assert torch.equal(embeddings.detach(), before)
    assert found.labels.dtype == found.counts.dtype == torch.int64


# --- properties --------------------------------------------------------------------------------


@st.composite
def samples(draw: st.DrawFn, max_size: int = 40) -> tuple[Tensor, Tensor]:
    """Points on a coarse grid: many ties, many duplicates, sizes around a block's end."""
    size = draw(st.integers(0, max_size))
    points = draw(st.lists(st.tuples(*[st.integers(-3, 3)] * 2), min_size=size, max_size=size))
    labels = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return (
        torch.tensor(points, dtype=dtype).reshape(size, 2) / 4,
        torch.tensor(labels, dtype=torch.int64),
    )


@quick
@given(samples(), st.integers(1, 6), st.integers(0, 2**63 - 1), st.sampled_from([0, 1]))
def test_every_result_is_whole(
    client: tuple[Tensor, Tensor], num_prototypes: int, seed: int, start: int
) -> None:
    embeddings, labels = client
    options: dict[str, Any] = {
        "num_classes": 4,
        "num_prototypes": num_prototypes,
        "seed": seed,
        "init": ("k-means++", "random")[start],
    }
    found = cluster_prototypes(embeddings, labels, **options)
    again = cluster_prototypes(embeddings, labels, **options)
    assert torch.equal(found.vectors, again.vectors)
    assert torch.equal(found.counts, again.counts)
    assert found.vectors.dtype == embeddings.dtype
    assert found.vectors.isfinite().all()
    assert found.labels.tolist() == sorted(found.labels.tolist())
    for label in range(4):
        points = embeddings[labels == label]
        vectors, counts = found.vectors[found.labels == label], found.counts[found.labels == label]
        assert counts.sum() == len(points)
        assert counts.tolist() == sorted(counts.tolist(), reverse=True)
        distinct = len({tuple(point) for point in points.tolist()})
        assert len(vectors) == len({tuple(vector) for vector in vectors.tolist()})
        if distinct <= num_prototypes:
            assert len(vectors) == distinct
        elif len(points):
            assert 1 <= len(vectors) <= num_prototypes
        if len(points):
            # The centroids' mean, weighted by their counts, is the mean of the class.
            torch.testing.assert_close(
                (vectors * counts.unsqueeze(1)).sum(0), points.sum(0), rtol=1e-5, atol=1e-5
            )


@quick
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 2**31)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from(["k-means++", "random"]),
)
def test_a_batch_of_clients_is_each_client_alone(
    clients: list[tuple[int, int]], num_prototypes: int, init: Any
) -> None:
    embeddings, labels, seeds = [], [], []
    for size, seed in clients:
        generator = torch.Generator().manual_seed(seed)
        embeddings.append(torch.rand(size, 6, dtype=torch.float64, generator=generator))
        labels.append(torch.randint(0, 3, (size,), generator=generator))
        seeds.append(seed)
    options: dict[str, Any] = {"num_classes": 3, "num_prototypes": num_prototypes, "init": init}
    together = cluster_clients(embeddings, labels, seeds, **options)
    assert len(together) == len(clients)
    for found, points, classes, seed in zip(together, embeddings, labels, seeds, strict=True):
        alone = cluster_prototypes(points, classes, seed=seed, **options)
        assert_same(found, alone, tolerance=1e-12)


def test_groups_that_settle_at_different_times_keep_their_own_results() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 250, (60,), generator=generator).tolist()
    embeddings = [torch.rand(size, 2, dtype=torch.float64, generator=generator) for size in sizes]
    labels = [torch.randint(0, 2, (size,), generator=generator) for size in sizes]
    options: dict[str, Any] = {"num_classes": 2, "num_prototypes": 4}
    together = cluster_clients(embeddings, labels, list(range(60)), **options)
    for client in range(60):
        alone = cluster_prototypes(embeddings[client], labels[client], seed=client, **options)
        assert_same(together[client], alone, tolerance=1e-12)


@quick
@given(samples())
def test_class_means_are_the_means(client: tuple[Tensor, Tensor]) -> None:
    embeddings, labels = client
    found = mean_clients([embeddings], [labels], num_classes=3)[0]
    present = sorted(set(labels.tolist()))
    assert found.labels.tolist() == present
    for vector, count, label in zip(found.vectors, found.counts, present, strict=True):
        points = embeddings[labels == label]
        assert count == len(points)
        torch.testing.assert_close(vector, points.mean(0))
    if len(embeddings):
        one = cluster_prototypes(embeddings, labels, num_classes=3, num_prototypes=1)
        assert_same(one, found)
