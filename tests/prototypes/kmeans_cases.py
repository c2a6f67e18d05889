"""Prototypes of a single class, and two results held to each other."""

from typing import Any

import torch

from mpfedcl.prototypes import Prototypes, cluster_prototypes


def one_class(points: Any, num_prototypes: int, **options: Any) -> Prototypes:
    embeddings = torch.as_tensor(points, dtype=options.pop("dtype", torch.float64))
    labels = torch.zeros(len(embeddings), dtype=torch.int64)
    return cluster_prototypes(
        embeddings, labels, num_classes=1, num_prototypes=num_prototypes, **options
    )


def assert_same(left: Prototypes, right: Prototypes, tolerance: float | None = None) -> None:
    assert torch.equal(left.labels, right.labels)
    assert torch.equal(left.counts, right.counts)
    torch.testing.assert_close(left.vectors, right.vectors, rtol=tolerance, atol=tolerance)
