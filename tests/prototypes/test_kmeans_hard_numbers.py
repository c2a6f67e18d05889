"""k-means where numbers are hard on it: offsets, scales, ties, empty clusters, draws."""

from typing import Any

import pytest
import torch
from kmeans_cases import assert_same, one_class

from mpfedcl.prototypes import cluster_prototypes, kmeans_prototypes
from mpfedcl.prototypes.kmeans import Blocks, choose_centers, draw_rows, run_lloyd

torch.set_num_threads(1)


@pytest.mark.parametrize("seed", range(5))
def test_large_common_offset_does_not_change_the_clusters(seed: int) -> None:
    # In float32 the squares are near 1e10 and the gaps 1e-2: products alone could not tell them.
    offset = torch.full((64,), 16384.0)
    low = offset.repeat(20, 1)
    high = offset.repeat(12, 1)
    low[:, 0] += torch.arange(20) / 512
    high[:, 0] += 4 + torch.arange(12) / 512
    found = one_class(torch.cat([high, low]), 2, seed=seed, dtype=torch.float32)
    assert found.counts.tolist() == [20, 12]


def test_scale_of_a_client_does_not_affect_others() -> None:
    generator = torch.Generator().manual_seed(0)
    small = 1e-6 * torch.rand(50, 3, generator=generator)
    large = 1e12 * torch.rand(50, 3, generator=generator)
    labels = torch.arange(50) % 2
    options: dict[str, Any] = {"num_classes": 2, "num_prototypes": 3}
    together = kmeans_prototypes([large, small, large], [labels] * 3, [4, 5, 6], **options)
    assert_same(together[1], cluster_prototypes(small, labels, seed=5, **options))
    assert together[1].counts.sum() == 50
    assert len(together[1]) == 6


def one_block(*values: float) -> Blocks:
    """A group of points on a line; the last one pads its block, as `run_kmeans` has it."""
    line = torch.tensor([*values, *[values[-1]] * (16 - len(values))], dtype=torch.float32)
    points = line.view(1, 16, 1)
    mask = torch.arange(16).unsqueeze(0) < len(values)
    return Blocks(points, mask, torch.zeros(1, dtype=torch.int64), 1)


def test_empty_cluster_moves_to_the_farthest_point() -> None:
    start = torch.zeros(1, 16, dtype=torch.int64)
    assert run_lloyd(one_block(100, 101, 140, 102), start, 2)[0, :4].tolist() == [0, 0, 1, 0]
    # Two are empty: they are refilled one after the other.
    found = run_lloyd(one_block(100, 101, 140, 102, 170), start, 3)[0, :5]
    assert found.tolist() == [0, 0, 2, 0, 1]
    # Nothing to move to: the spare clusters stay empty, and nothing becomes NaN.
    assert run_lloyd(one_block(7, 7, 7), start, 3).tolist() == start.tolist()


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
def test_initial_centers_match_the_draws(spread: bool, draw: float, nearest: list[int]) -> None:
    blocks = one_block(0, 1, 10)
    draws = torch.tensor([[0.3, draw]])
    clusters, unsolved, _ = choose_centers(blocks, torch.tensor([3]), draws, spread=spread)
    assert clusters[0, :3].tolist() == nearest
    assert unsolved.tolist() == [True]


def test_ties_between_two_centers_go_to_the_first() -> None:
    blocks = one_block(-1, 0, 1)
    draws = torch.tensor([[0.0, 0.9]])
    clusters, _, middle = choose_centers(blocks, torch.tensor([3]), draws, spread=True)
    assert clusters[0, :3].tolist() == [0, 0, 1]
    assert middle.tolist() == [[0]]


def test_rows_are_drawn_in_proportion_to_their_weight() -> None:
    weight = torch.zeros(2, 16, dtype=torch.float64)
    weight[0, [3, 5]] = torch.tensor([1.0, 3.0], dtype=torch.float64)
    weight[1, 4] = 1e-200
    group = torch.tensor([0, 1])
    begin, end = torch.tensor([0, 16]), torch.tensor([15, 31])
    for draw, row in ((0.0, 3), (0.2499, 3), (0.25, 5), (1 - 2**-24, 5)):
        draws = torch.tensor([draw, draw])
        drawn = draw_rows(weight, weight.sum(1), draws, group, begin, end)
        assert drawn.tolist() == [row, 20]


def test_embeddings_are_detached_and_labels_may_have_any_integer_type() -> None:
    embeddings = torch.rand(9, 2, requires_grad=True)
    before = embeddings.detach().clone()
    labels = torch.arange(9, dtype=torch.uint8) % 2
    found = cluster_prototypes(embeddings, labels, num_classes=2, num_prototypes=2)
    assert not found.vectors.requires_grad
    assert torch.equal(embeddings.detach(), before)
    assert found.labels.dtype == found.counts.dtype == torch.int64
