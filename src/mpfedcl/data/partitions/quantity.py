"""Dirichlet shares of all images, so that clients differ in size."""

import numpy

from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.partitions._drawing import (
    assign_images,
    draw_label_counts,
    draw_shares,
    redraw,
    refuse_impossible,
    round_shares,
)
from mpfedcl.data.samples import Indices


def partition(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    alpha: float,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Split the images at random by shares of the whole from a Dirichlet distribution."""
    refuse_impossible(labels, num_clients, min_size, test_fraction)
    generator = numpy_generator(seed, "partition", "quantity")
    num_classes = int(labels.max()) + 1
    everyone = numpy.ones((1, num_clients), dtype=bool)

    def draw_once() -> Indices:
        sizes = round_shares(draw_shares(everyone, alpha, generator), len(labels))[0]
        if sizes.min() < min_size:
            return numpy.zeros((num_clients, num_classes), dtype=numpy.int64)
        return draw_label_counts(labels, sizes, generator)

    def draw(num_draws: int) -> Indices:
        return numpy.stack([draw_once() for _ in range(num_draws)])

    counts = redraw(draw, labels, num_clients, min_size, test_fraction, "quantity", alpha)
    return assign_images(labels, counts, generator)
