"""Every kind of partition, and what is counted of its shares."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpfedcl.data.partitions import PARTITION_FUNCTIONS
from mpfedcl.data.samples import Indices

Partition = Callable[..., list[Indices]]

KINDS: dict[str, tuple[Partition, dict[str, Any]]] = {
    "iid": (PARTITION_FUNCTIONS["iid"], {}),
    "label": (PARTITION_FUNCTIONS["label"], {"alpha": 0.5}),
    "label, plain": (PARTITION_FUNCTIONS["label"], {"alpha": 0.5, "balanced": False}),
    "quantity": (PARTITION_FUNCTIONS["quantity"], {"alpha": 0.5}),
    "classes": (PARTITION_FUNCTIONS["classes"], {"classes_per_client": 1}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def partition_labels(kind: str, labels: Indices, num_clients: int, **options: Any) -> list[Indices]:
    function, defaults = KINDS[kind]
    return function(labels, num_clients, **{"seed": 0, **defaults, **options})


def make_labels(num_images: int, num_classes: int, seed: int = 0) -> Indices:
    return numpy.random.default_rng(seed).integers(0, num_classes, num_images)


def count(labels: Indices, shares: list[Indices]) -> Indices:
    num_classes = int(labels.max()) + 1
    return numpy.stack([numpy.bincount(labels[share], minlength=num_classes) for share in shares])


def assert_each_image_once(labels: Indices, shares: list[Indices]) -> None:
    assigned = numpy.concatenate(shares)
    assert numpy.array_equal(numpy.sort(assigned), numpy.arange(len(labels)))
