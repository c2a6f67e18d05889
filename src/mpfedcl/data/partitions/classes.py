"""A few classes for each client."""

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.partitions._drawing import assign_images, redraw, refuse_impossible
from mpfedcl.data.samples import Indices


def partition(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    classes_per_client: int,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Give each client a few classes, and each class's images in equal shares to its holders.

    Classes are spread evenly: the numbers of their clients differ by one at most. With more classes
    than clients * classes_per_client, some classes have no client and are left out.
    """
    refuse_impossible(labels, num_clients, min_size, test_fraction)
    class_sizes = numpy.bincount(labels)
    present = numpy.flatnonzero(class_sizes)
    if classes_per_client > len(present):
        raise InvalidInput(
            f"partition.classes_per_client is {classes_per_client}; it must be at most "
            f"{len(present)}, the number of classes in the data."
        )
    generator = numpy_generator(seed, "partition", "classes")

    def draw(num_draws: int) -> Indices:
        holds = numpy.zeros((num_draws, num_clients, len(present)), dtype=bool)
        num_holders = numpy.zeros((num_draws, len(present)), dtype=numpy.int64)
        ties = generator.random((num_clients, *num_holders.shape))
        rows = numpy.arange(num_draws)[:, None]
        for client in range(num_clients):
            # The classes with the fewest holders; the fraction only breaks ties.
            order = (num_holders + ties[client]).argsort(axis=1)
            holds[rows, client, order[:, :classes_per_client]] = True
            num_holders += holds[:, client]
        share, extra = numpy.divmod(class_sizes[present], numpy.maximum(1, num_holders))
        rank = numpy.cumsum(holds, axis=1) - 1
        counts = numpy.zeros((num_draws, num_clients, len(class_sizes)), dtype=numpy.int64)
        counts[:, :, present] = holds * (share[:, None, :] + (rank < extra[:, None, :]))
        return counts

    counts = redraw(draw, labels, num_clients, min_size, test_fraction, "classes", None)
    return assign_images(labels, counts, generator)
