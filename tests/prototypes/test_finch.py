"""FINCH against a plain loop over its definition, and its pools."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mpfedcl.prototypes import (
    PrototypePool,
    cluster_prototypes,
    finch_pool,
    finch_prototypes,
    run_finch,
)


def slow_components(points: Tensor) -> list[int]:
    """Join each point with its nearest by cosine, by repeated relabeling."""
    unit = [numpy.array(p) / numpy.linalg.norm(p) for p in points.tolist()]
    labels = list(range(len(unit)))
    for i, one in enumerate(unit):
        if len(unit) > 1:
            others = [j for j in range(len(unit)) if j != i]
            near = max(others, key=lambda j: float(one @ unit[j]))
            old, new = labels[near], labels[i]
            labels = [new if each == old else each for each in labels]
    return [sorted(set(labels)).index(each) for each in labels]


def slow_finch(points: Tensor) -> list[int]:
    labels = slow_components(points)
    while len(set(labels)) > 1:
        means = [
            points[[i for i, each in enumerate(labels) if each == k]].mean(0)
            for k in sorted(set(labels))
        ]
        coarser = slow_components(torch.stack(means))
        if len(set(coarser)) == 1:
            break
        labels = [coarser[each] for each in labels]
    return labels


def same_partition(one: list[int], other: list[int]) -> bool:
    pairs = set(zip(one, other, strict=True))
    return len(pairs) == len(set(one)) == len(set(other))


@given(st.integers(1, 40), st.integers(2, 5), st.integers(0, 10_000))
def test_equals_the_slow_loop(size: int, dimension: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    points = torch.randn(size, dimension, generator=draws, dtype=torch.float64)
    assert same_partition(run_finch(points).tolist(), slow_finch(points))


def test_finds_separate_directions() -> None:
    angles = torch.tensor([0.0, 0.01, 0.03, 2.0, 2.01, 2.04, 4.0, 4.01])
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert same_partition(run_finch(points).tolist(), [0, 0, 0, 1, 1, 1, 2, 2])


def test_prototypes_are_the_means_of_the_clusters() -> None:
    points = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 5.0], [2.0, 2.0]])
    (found,) = finch_prototypes([points], [torch.tensor([0, 0, 0, 0, 1])], num_classes=3)
    assert found.labels.tolist() == [0, 0, 1]
    assert found.counts.tolist() == [2, 2, 1]
    assert found.vectors.tolist() == [[2.0, 0.0], [0.0, 3.0], [2.0, 2.0]]


def test_pool_keeps_the_limit_of_prototypes_per_owner() -> None:
    prototypes = {
        f"client-{number}": cluster_prototypes(
            torch.tensor([[1.0, 0.01 * number], [0.01 * number, 1.0]]) * (1 + number % 2),
            torch.tensor([0, 0]),
            num_classes=2,
            num_prototypes=2,
        )
        for number in range(4)
    }
    pool = PrototypePool.gather(prototypes, num_classes=2, num_prototypes=1 + 1)
    found = finch_pool(pool)
    assert len(found) == 2
    assert int(found.held.max()) <= 2
    assert sorted(found.counts.tolist()) == [4, 4]


def test_empty_pool_stays_empty() -> None:
    pool = PrototypePool.empty(3, 2, 1)
    assert finch_pool(pool) is pool
    assert finch_prototypes([], [], num_classes=3) == []


@pytest.mark.parametrize("size", [1, 2])
def test_few_points_are_one_cluster(size: int) -> None:
    assert run_finch(torch.eye(2)[:size]).tolist() == [0] * size
