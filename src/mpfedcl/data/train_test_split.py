"""Splits into training and test images, class by class, so that both have the same classes."""

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

Indices = NDArray[numpy.int64]


def count_training(counts: Indices, test_fraction: float | None) -> Indices:
    """Return how many of `counts` images of a class train: at least one wherever there is one.

    Without a test fraction nothing is held out.
    """
    if test_fraction is None:
        return counts
    rounded: Indices = numpy.rint(counts * (1 - test_fraction)).astype(numpy.int64)
    training: Indices = numpy.minimum(counts, numpy.maximum(1, rounded))
    return training


def split_by_class(
    labels: Indices, test_fraction: float, generator: Generator
) -> tuple[Indices, Indices]:
    """Return the positions that train and those that test, each in ascending order."""
    sizes = numpy.array([len(labels)])
    trains = draw_training(labels, sizes, test_fraction, lambda _: generator)
    return numpy.flatnonzero(trains), numpy.flatnonzero(~trains)


def draw_training(
    labels: Indices, sizes: Indices, test_fraction: float, generator_of: Callable[[int], Generator]
) -> NDArray[numpy.bool_]:
    """Tell of each sample whether it trains or is held out, client by client, class by class.

    Args:
        labels: Those of all clients, one client after the other.
        sizes: How many samples each client has.
        test_fraction: The share of each class that a client holds out.
        generator_of: Each client's own randomness, by its place; its classes use it in their order.
    """
    trains = numpy.ones(len(labels), dtype=bool)
    if not len(labels):
        return trains
    num_classes = int(labels.max()) + 1
    cells = numpy.repeat(numpy.arange(len(sizes)), sizes) * num_classes + labels
    order = numpy.argsort(cells, kind="stable")
    found, begins, counts = numpy.unique(cells[order], return_index=True, return_counts=True)
    # Only drawing goes client by client; a class with a single sample needs no draw.
    several = counts > 1
    ends = begins + counts
    drawn = zip(
        (found[several] // num_classes).tolist(),
        begins[several].tolist(),
        ends[several].tolist(),
        strict=True,
    )
    for place, group in groupby(drawn, key=itemgetter(0)):
        shuffle = generator_of(place).shuffle
        for _, begin, end in group:
            shuffle(order[begin:end])
    last = begins + count_training(counts, test_fraction)
    trains[order] = numpy.arange(len(order)) < numpy.repeat(last, counts)
    return trains
