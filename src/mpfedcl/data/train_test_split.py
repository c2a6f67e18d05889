"""Splits into training and test images, class by class, so that both have the same classes."""

import numpy
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
    labels: Indices, test_fraction: float, generator: numpy.random.Generator
) -> tuple[Indices, Indices]:
    """Return the positions that train and those that test, each in ascending order."""
    training: list[Indices] = []
    testing: list[Indices] = []
    for label in numpy.unique(labels):
        members = generator.permutation(numpy.flatnonzero(labels == label))
        cut = int(count_training(numpy.asarray(len(members)), test_fraction))
        training.append(members[:cut])
        testing.append(members[cut:])
    return _join(training), _join(testing)


def _join(pieces: list[Indices]) -> Indices:
    joined = numpy.concatenate([numpy.empty(0, dtype=numpy.int64), *pieces])
    joined.sort()
    return joined
