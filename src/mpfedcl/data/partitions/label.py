"""Dirichlet shares of each class."""

import numpy

from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.partitions._drawing import (
    assign_images,
    draw_shares,
    redraw,
    refuse_impossible,
    round_shares,
)
from mpfedcl.data.samples import Indices, count_training


def partition(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    alpha: float,
    balanced: bool = True,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Split each class by shares from a Dirichlet distribution over the clients.

    `balanced`: a client that already holds its fair share of all images (images / clients) gets
    none of the next class; the shares of the others are scaled up, and drawn again if they are
    all zero.
    """
    refuse_impossible(labels, num_clients, min_size, test_fraction)
    generator = numpy_generator(seed, "partition", "label")
    class_sizes = numpy.bincount(labels)

    def draw(num_draws: int) -> Indices:
        counts = numpy.zeros((num_draws, num_clients, len(class_sizes)), dtype=numpy.int64)
        held = numpy.zeros((num_draws, num_clients), dtype=numpy.int64)
        training = numpy.zeros_like(held)
        hopeful = numpy.arange(num_draws)
        left = len(labels)
        for label in numpy.flatnonzero(class_sizes):
            is_open = numpy.ones((len(hopeful), num_clients), dtype=bool)
            if balanced:
                # held >= images / clients, in integers.
                is_open = held[hopeful] * num_clients < len(labels)
            shares = draw_shares(is_open, alpha, generator)
            drawn = round_shares(shares, int(class_sizes[label]))
            counts[hopeful, :, label] = drawn
            held[hopeful] += drawn
            training[hopeful] += count_training(drawn, test_fraction)
            # Draws that can no longer give everyone enough are not worth finishing.
            left -= int(class_sizes[label])
            missing = numpy.maximum(0, min_size - training[hopeful]).sum(axis=1)
            hopeful = hopeful[missing <= left]
            if len(hopeful) == 0:
                break
        return counts

    counts = redraw(draw, labels, num_clients, min_size, test_fraction, "label", alpha)
    return assign_images(labels, counts, generator)
