"""Equal shares at random."""

import numpy

from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.partitions._drawing import (
    assign_images,
    draw_label_counts,
    redraw,
    refuse_impossible,
)
from mpfedcl.data.samples import Indices


def partition(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Split the images at random into shares that differ by one image at most."""
    refuse_impossible(labels, num_clients, min_size, test_fraction)
    generator = numpy_generator(seed, "partition", "iid")
    owners = numpy.arange(len(labels)) * num_clients // len(labels)
    sizes = numpy.bincount(owners, minlength=num_clients)

    def draw(num_draws: int) -> Indices:
        return numpy.stack([draw_label_counts(labels, sizes, generator) for _ in range(num_draws)])

    counts = redraw(draw, labels, num_clients, min_size, test_fraction, "iid", None)
    return assign_images(labels, counts, generator)
