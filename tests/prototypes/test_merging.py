"""A merged pool: bounded, with the same means, and as good as k-means of all that it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from mpfedcl.prototypes import PrototypePool, Prototypes, merge_prototypes


def draw_pool(
    num_clients: int, per_class: int, num_classes: int, seed: int = 0, dimension: int = 5
) -> PrototypePool:
    """A pool in which each client holds about half of the classes."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for client in range(num_clients):
        held = (torch.rand(num_classes, generator=generator) < 0.5).nonzero().squeeze(1)
        labels = held.repeat_interleave(per_class)
        vectors = torch.randn(len(labels), dimension, generator=generator, dtype=torch.float64)
        counts = torch.randint(1, 9, (len(labels),), generator=generator)
        rows[f"client-{client:03}"] = Prototypes(vectors, labels, counts)
    return PrototypePool.gather(
        rows, num_classes=num_classes, num_prototypes=per_class, dimension=dimension
    )


def merge(pool: PrototypePool, most: int, seed: int = 0) -> PrototypePool:
    return merge_prototypes(pool, most, torch.Generator().manual_seed(seed))


def test_small_pool_is_returned_unchanged() -> None:
    pool = draw_pool(4, 2, 3)
    assert merge(pool, 8) is pool
    empty = PrototypePool.empty(3, 5, 2)
    assert merge(empty, 1) is empty


@settings(max_examples=40)
@given(
    num_clients=st.integers(1, 12),
    per_class=st.integers(1, 3),
    num_classes=st.integers(1, 4),
    most=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_merged_pool_is_bounded_and_keeps_counts_and_means(
    num_clients: int, per_class: int, num_classes: int, most: int, seed: int
) -> None:
    pool = draw_pool(num_clients, per_class, num_classes, seed)
    merged = merge(pool, most, seed)
    assert len(merged) <= len(pool)
    if len(merged):
        assert int(torch.bincount(merged.labels).max()) <= most
    nothing = torch.zeros(num_classes, dtype=torch.int64)
    before, after = (nothing.index_add(0, one.labels, one.counts) for one in (pool, merged))
    assert torch.equal(before, after)
    assert torch.equal(merged.present, pool.present)
    torch.testing.assert_close(merged.class_centers().vectors, pool.class_centers().vectors)


def test_groups_own_at_most_k_of_a_class_and_the_first_has_the_largest() -> None:
    merged = merge(draw_pool(30, 2, 3), 5)
    assert merged.names == ("group-1", "group-2", "group-3")
    assert int(merged.held.max()) == 2
    assert merged.held.sum(0).tolist() == [5, 5, 5]
    for label in range(3):
        counts = merged.counts[merged.labels == label].tolist()
        assert counts == sorted(counts, reverse=True)


def test_prototypes_are_weighted_by_their_samples() -> None:
    # 0 and 1 stand for 3 samples and 1; 10 for one. Two places: {0, 1} at 0.25, and 10.
    pool = PrototypePool.gather(
        {
            "a": Prototypes(
                torch.tensor([[0.0], [1.0], [10.0]]), torch.zeros(3).long(), torch.tensor([3, 1, 1])
            )
        },
        num_classes=1,
    )
    merged = merge(pool, 2)
    assert merged.vectors.flatten().tolist() == [0.25, 10.0]
    assert merged.counts.tolist() == [4, 1]


def test_inertia_equals_weighted_kmeans_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(5)
    centres = 20 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    points = centres.repeat(25, 1) + torch.randn(100, 3, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 50, (100,), generator=generator)
    pool = PrototypePool.gather(
        {"a": Prototypes(points, torch.zeros(100).long(), counts)}, num_classes=1
    )
    merged = merge(pool, 4)
    other = KMeans(4, n_init=10, random_state=0).fit(points.numpy(), sample_weight=counts.numpy())
    found = merged.distances_by_class(points).squeeze(1).square()
    assert float((counts * found).sum()) == pytest.approx(other.inertia_, rel=1e-9)


def test_same_draws_give_the_same_pool() -> None:
    pool = draw_pool(40, 2, 3)
    first, again = merge(pool, 7), merge(pool, 7)
    assert torch.equal(first.vectors, again.vectors)
    assert not torch.equal(first.vectors, merge(pool, 7, seed=1).vectors)


def test_bound_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="most is 0; it must be at least 1"):
        merge(draw_pool(2, 1, 1), 0)
