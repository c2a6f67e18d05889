"""k-means prototypes as properties: whole, the same in any company, means of their class."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kmeans_cases import assert_same
from torch import Tensor

from mpfedcl.prototypes import cluster_prototypes, kmeans_prototypes, mean_prototypes

torch.set_num_threads(1)
quick = settings(deadline=None, max_examples=60)


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
def test_every_result_is_valid_and_reproducible(
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
def test_batch_of_clients_matches_single_clients(
    clients: list[tuple[int, int]], num_prototypes: int, init: Any
) -> None:
    embeddings, labels, seeds = [], [], []
    for size, seed in clients:
        generator = torch.Generator().manual_seed(seed)
        embeddings.append(torch.rand(size, 6, dtype=torch.float64, generator=generator))
        labels.append(torch.randint(0, 3, (size,), generator=generator))
        seeds.append(seed)
    options: dict[str, Any] = {"num_classes": 3, "num_prototypes": num_prototypes, "init": init}
    together = kmeans_prototypes(embeddings, labels, seeds, **options)
    assert len(together) == len(clients)
    for found, points, classes, seed in zip(together, embeddings, labels, seeds, strict=True):
        alone = cluster_prototypes(points, classes, seed=seed, **options)
        assert_same(found, alone, tolerance=1e-12)


def test_groups_that_converge_at_different_times_keep_their_results() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 250, (60,), generator=generator).tolist()
    embeddings = [torch.rand(size, 2, dtype=torch.float64, generator=generator) for size in sizes]
    labels = [torch.randint(0, 2, (size,), generator=generator) for size in sizes]
    options: dict[str, Any] = {"num_classes": 2, "num_prototypes": 4}
    together = kmeans_prototypes(embeddings, labels, list(range(60)), **options)
    for client in range(60):
        alone = cluster_prototypes(embeddings[client], labels[client], seed=client, **options)
        assert_same(together[client], alone, tolerance=1e-12)


@quick
@given(samples())
def test_mean_prototypes_are_class_means(client: tuple[Tensor, Tensor]) -> None:
    embeddings, labels = client
    found = mean_prototypes([embeddings], [labels], num_classes=3)[0]
    present = sorted(set(labels.tolist()))
    assert found.labels.tolist() == present
    for vector, count, label in zip(found.vectors, found.counts, present, strict=True):
        points = embeddings[labels == label]
        assert count == len(points)
        torch.testing.assert_close(vector, points.mean(0))
    if len(embeddings):
        one = cluster_prototypes(embeddings, labels, num_classes=3, num_prototypes=1)
        assert_same(one, found)
