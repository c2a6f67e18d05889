"""The pool: gathering, padding, nearest prototypes, global prototypes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.prototypes import pool as pool_module

torch.set_num_threads(1)
quick = settings(deadline=None, max_examples=60)


def shared(rows: list[tuple[int, list[float], int]], dtype: Any = torch.float64) -> Prototypes:
    """Prototypes from rows of (class, vector, count)."""
    labels = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    vectors = torch.tensor([row[1] for row in rows], dtype=dtype)
    return Prototypes(vectors, labels, torch.tensor([row[2] for row in rows], dtype=torch.int64))


def small_pool() -> PrototypePool:
    """a: two of class 0, one of class 1; b: one of class 0; class 2 is nobody's; K = 2."""
    return PrototypePool.gather(
        {
            "b": shared([(0, [6, 3], 4)]),
            "none": Prototypes.empty(2, torch.float64),
            "a": shared([(0, [0, 0], 9), (0, [0, 3], 1), (1, [8, 8], 2)]),
        },
        num_classes=3,
        num_prototypes=2,
    )


@st.composite
def pools(draw: st.DrawFn) -> tuple[dict[str, Prototypes], int, int]:
    """Clients' prototypes on a coarse grid, the number of classes, and K."""
    num_classes, num_prototypes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    names = draw(st.lists(st.text("abc10", min_size=1, max_size=3), unique=True, max_size=5))
    coordinates = st.integers(-4, 4).map(float)
    clients = {}
    for name in names:
        rows = [
            (label, draw(st.lists(coordinates, min_size=2, max_size=2)), draw(st.integers(1, 9)))
            for label in range(num_classes)
            for _ in range(draw(st.integers(0, num_prototypes)))
        ]
        clients[name] = shared(rows) if rows else Prototypes.empty(2, torch.float64)
    return clients, num_classes, num_prototypes


def gather(clients: dict[str, Prototypes], num_classes: int, num_prototypes: int) -> PrototypePool:
    return PrototypePool.gather(
        clients, num_classes=num_classes, num_prototypes=num_prototypes, dimension=2
    )


# --- gathering ---------------------------------------------------------------------------------


def test_clients_are_sorted_by_name() -> None:
    pool = small_pool()
    assert pool.names == ("a", "b")
    assert pool.num_clients == 2
    assert len(pool) == 4
    assert pool.dimension == 2
    assert pool.owners.tolist() == [0, 0, 0, 1]
    assert pool.labels.tolist() == [0, 0, 1, 0]
    assert pool.counts.tolist() == [9, 1, 2, 4]
    assert pool.vectors.tolist() == [[0, 0], [0, 3], [8, 8], [6, 3]]
    assert pool.present.tolist() == [True, True, False]
    assert pool.of("b").vectors.tolist() == [[6, 3]]
    assert pool.of("a").counts.tolist() == [9, 1, 2]
    assert len(pool.of("none")) == 0


@quick
@given(pools(), st.randoms())
def test_order_of_the_mapping_does_not_matter(
    drawn: tuple[dict[str, Prototypes], int, int], random: Any
) -> None:
    clients, num_classes, num_prototypes = drawn
    shuffled = list(clients.items())
    random.shuffle(shuffled)
    left = gather(clients, num_classes, num_prototypes)
    right = gather(dict(shuffled), num_classes, num_prototypes)
    assert left.names == right.names
    for field in ("vectors", "labels", "counts", "owners"):
        assert torch.equal(getattr(left, field), getattr(right, field))
    for name, prototypes in clients.items():
        assert torch.equal(left.of(name).vectors, prototypes.vectors)
        assert torch.equal(left.of(name).labels, prototypes.labels)


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ({"a": [(0, [1.0], 1)], "b": [(0, [1.0, 2.0], 1)]}, {}, "dimensions 1, 2"),
        ({"a": [(0, [1.0], 1)]}, {"dimension": 3}, "dimensions 1, 3"),
        ({"a": [(2, [1.0], 1)]}, {}, "label 2 is out of range"),
        ({"a": [(-1, [1.0], 1)]}, {}, "label -1 is out of range"),
        ({"a": [(0, [float("nan")], 1)]}, {}, "NaN or infinity"),
        ({"a": [(0, [float("inf")], 1)]}, {}, "NaN or infinity"),
        ({"b": [(1, [1.0], 1)] * 3, "a": [(1, [1.0], 1)]}, {}, "client b has 3 .* of class 1"),
        ({"a": [(0, [1.0], 1)]}, {"num_prototypes": 0}, "num_prototypes is 0"),
        ({"a": [(0, [1.0], 1)]}, {"num_classes": 0}, "num_classes is 0"),
        ({}, {}, "needs its dimension"),
    ],
)
def test_invalid_pool_is_rejected_with_one_sentence(
    clients: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    settings_ = {"num_classes": 2, "num_prototypes": 2} | options
    with pytest.raises(ValueError, match=message) as error:
        PrototypePool.gather({name: shared(rows) for name, rows in clients.items()}, **settings_)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_constructor_validates_the_pool() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="owner 1 is out of range"):
        PrototypePool(torch.zeros(1, 2), one, one, one + 1, ("a",), 2)
    with pytest.raises(ValueError, match="needs int64 labels"):
        PrototypePool(torch.zeros(2, 2), one, one, one, ("a",), 2)


def test_to_changes_only_the_precision() -> None:
    moved = small_pool().to("cpu", torch.float32)
    assert moved.vectors.dtype == torch.float32
    assert moved.labels.dtype == torch.int64
    assert moved.names == ("a", "b")
    assert small_pool().to().vectors.dtype == torch.float64


# --- padding -----------------------------------------------------------------------------------


def test_padding_matches_the_written_out_grid() -> None:
    pool = small_pool()
    # Class 0: the mean of (0,0), (0,3), (6,3) is (2,2); class 1 has only (8,8).
    assert pool.class_means().tolist() == [[2, 2], [8, 8], [0, 0]]
    grid, present = pool.padded("all")
    assert present.tolist() == [True, True, False]
    assert grid.tolist() == [
        [[[0, 0], [8, 8], [0, 0]], [[0, 3], [8, 8], [0, 0]]],
        [[[2, 2], [8, 8], [0, 0]], [[2, 2], [8, 8], [0, 0]]],
    ]
    filled, _ = pool.padded("fill")
    assert filled.tolist() == [
        [[[0, 0], [8, 8], [0, 0]], [[0, 3], [8, 8], [0, 0]]],
        [[[6, 3], [8, 8], [0, 0]], [[2, 2], [8, 8], [0, 0]]],
    ]
    with pytest.raises(ValueError, match="padding is 'none'"):
        pool.padded("none")  # type: ignore[arg-type]


def test_all_and_fill_differ_if_a_client_has_fewer_than_k() -> None:
    clients = {"a": shared([(0, [1, 0], 2), (0, [3, 0], 1)]), "b": shared([(0, [5, 0], 1)])}
    pool = PrototypePool.gather(clients, num_classes=1, num_prototypes=3)
    assert pool.padded("all")[0][:, :, 0, 0].tolist() == [[3, 3, 3], [3, 3, 3]]
    assert pool.padded("fill")[0][:, :, 0, 0].tolist() == [[1, 3, 3], [5, 3, 3]]
    # Without K it is the largest number that anybody has of a class.
    free = PrototypePool.gather(clients, num_classes=1)
    assert free.padded("fill")[0][:, :, 0, 0].tolist() == [[1, 3], [5, 3]]
    assert free.padded("all")[0][:, :, 0, 0].tolist() == [[1, 3], [3, 3]]


@quick
@given(pools(), st.sampled_from(["all", "fill"]))
def test_padding_matches_a_plain_loop(
    drawn: tuple[dict[str, Prototypes], int, int], padding: Any
) -> None:
    clients, num_classes, num_prototypes = drawn
    grid, present = gather(clients, num_classes, num_prototypes).padded(padding)
    names = sorted(name for name in clients if len(clients[name]))
    assert grid.shape == (len(names), num_prototypes, num_classes, 2)
    for label in range(num_classes):
        held = [clients[name].vectors[clients[name].labels == label] for name in names]
        everything = torch.cat([*held, torch.zeros(0, 2, dtype=torch.float64)])
        assert present[label] == (len(everything) > 0)
        for client, own in enumerate(held):
            for slot in range(num_prototypes):
                keep = len(own) == num_prototypes or (padding == "fill" and slot < len(own))
                expected = own[slot] if keep else everything.mean(0)
                if not len(everything):
                    expected = torch.zeros(2, dtype=torch.float64)
                torch.testing.assert_close(grid[client, slot, label], expected)


# --- the empty pool ----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prototypes", "num_slots"), [(2, 2), (None, 0)])
def test_empty_pool_has_empty_results(num_prototypes: int | None, num_slots: int) -> None:
    empty = {"a": Prototypes.empty(4, torch.float64)}
    for pool in (
        PrototypePool.empty(3, 4, num_prototypes, dtype=torch.float64),
        PrototypePool.gather({}, num_classes=3, num_prototypes=num_prototypes, dimension=4),
        PrototypePool.gather(empty, num_classes=3, num_prototypes=num_prototypes),
    ):
        assert (pool.num_clients, len(pool), pool.dimension, pool.names) == (0, 0, 4, ())
        grid, present = pool.padded()
        assert grid.shape == (0, num_slots, 3, 4)
        assert present.tolist() == [False] * 3
        assert pool.class_means().tolist() == [[0] * 4] * 3
        label, distance = pool.nearest(torch.zeros(2, 4))
        assert label.tolist() == [-1, -1]
        assert distance.tolist() == [torch.inf] * 2
        assert len(pool.averaged_over_owners()) == 0
        assert pool.averaged_over_owners().num_prototypes == 1
    assert PrototypePool.gather(empty, num_classes=3).vectors.dtype == torch.float64


# --- nearest -----------------------------------------------------------------------------------


def test_nearest_matches_hand_computed_distances() -> None:
    z = torch.tensor([[0.0, 0.0], [6.0, 7.0], [3.0, 3.0], [8.0, 8.0]], dtype=torch.float64)
    label, distance = small_pool().nearest(z)
    # (3,3) is nearer to (2,2) than to anything real, but (2,2) is only padding.
    assert label.tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(distance, [0, 5**0.5, 3, 0])
    assert [tensor.shape for tensor in small_pool().nearest(z[:0])] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_query_equal_to_a_prototype_has_distance_zero(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # In float32 a product of such vectors is off by more than the gaps between them.
    vectors = 1000 + torch.rand(37, 256, dtype=dtype, generator=generator)
    labels = torch.arange(37).sort().values % 37
    pool = PrototypePool.gather(
        {"a": Prototypes(vectors, labels, torch.ones(37, dtype=torch.int64))}, num_classes=37
    )
    label, distance = pool.nearest(vectors)
    assert label.tolist() == labels.tolist()
    assert distance.tolist() == [0] * 37
    assert distance.dtype == dtype


@pytest.mark.parametrize("seed", range(20))
def test_ties_go_to_the_lowest_class(seed: int) -> None:
    # The same vector under several classes; a product's rounding may differ from row to row.
    generator = torch.Generator().manual_seed(seed)
    vector = torch.rand(33, generator=generator).tolist()
    others = [(label, torch.rand(33, generator=generator).tolist(), 1) for label in range(7)]
    pool = PrototypePool.gather(
        {
            "a": shared([*others, (6, vector, 1)], torch.float32),
            "b": shared([(4, vector, 1), (2, vector, 1)], torch.float32),
        },
        num_classes=7,
    )
    z = torch.tensor([vector]) + 1e-3 * torch.rand(9, 33, generator=generator)
    assert pool.nearest(z)[0].tolist() == [2] * 9


def test_non_finite_query_has_no_class() -> None:
    z = torch.tensor([[torch.nan, 0.0], [0.0, 0.0], [torch.inf, 0.0]], dtype=torch.float64)
    label, distance = small_pool().nearest(z)
    assert label.tolist() == [-1, 0, -1]
    assert distance.isnan().tolist() == [True, False, True]


def test_queries_of_another_shape_are_rejected() -> None:
    for z in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"must be floating point of shape \[B, 2\]"):
            small_pool().nearest(z)


@quick
@given(pools(), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_nearest_matches_a_brute_force_search(
    drawn: tuple[dict[str, Prototypes], int, int], seed: int, dtype: torch.dtype
) -> None:
    pool = gather(*drawn)
    z = torch.randint(-4, 5, (7, 2), generator=torch.Generator().manual_seed(seed)).to(dtype)
    label, distance = pool.nearest(z)
    for query, found, away in zip(z.double(), label.tolist(), distance.tolist(), strict=True):
        if not len(pool):
            assert (found, away) == (-1, torch.inf)
            continue
        distances = (pool.vectors - query).square().sum(1).sqrt()
        assert away == pytest.approx(float(distances.min()), abs=1e-6)
        # On a grid of integers these distances are exact, ties included.
        assert found == min(pool.labels[distances == distances.min()].tolist())


def test_queries_in_chunks_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 9
    whole = small_pool().nearest(z)
    monkeypatch.setattr(pool_module, "_CHUNK", 12)
    pieces = small_pool().nearest(z)
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_nearest_keeps_no_graph() -> None:
    z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    assert not small_pool().nearest(z)[1].requires_grad


# --- global prototypes -------------------------------------------------------------------------


def test_global_prototypes_weigh_owners_equally() -> None:
    collapsed = small_pool().averaged_over_owners()
    # Class 0: a's mean is (0, 1.5), b's is (6, 3); each counts once.
    assert collapsed.vectors.tolist() == [[3, 2.25], [8, 8]]
    assert collapsed.labels.tolist() == [0, 1]
    assert collapsed.counts.tolist() == [14, 2]
    assert collapsed.names == ("global",)
    assert collapsed.owners.tolist() == [0, 0]
    assert collapsed.num_prototypes == 1
    assert collapsed.num_classes == 3


@quick
@given(pools())
def test_global_prototypes_are_means_of_means(
    drawn: tuple[dict[str, Prototypes], int, int],
) -> None:
    clients, num_classes, _ = drawn
    collapsed = gather(*drawn).averaged_over_owners()
    expected: dict[int, Tensor] = {}
    for label in range(num_classes):
        means = [
            client.vectors[client.labels == label].mean(0)
            for client in clients.values()
            if (client.labels == label).any()
        ]
        if means:
            expected[label] = torch.stack(means).mean(0)
    assert collapsed.labels.tolist() == list(expected)
    if expected:
        torch.testing.assert_close(collapsed.vectors, torch.stack(list(expected.values())))
    total = sum(int(client.counts.sum()) for client in clients.values())
    assert int(collapsed.counts.sum()) == total
