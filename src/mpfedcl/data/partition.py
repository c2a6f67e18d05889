"""Partitions: which client gets which images, from the labels alone.

Each kind first draws a table of counts [clients, classes], again and again until every client has
`min_size` training images, and only then assigns the images of each class at random. Every image
goes to exactly one client; only `partition_by_classes` leaves out classes that nobody holds.

With a `test_fraction`, each client holds out that share of each of its classes for its own test
(`partition.test` "matched"), and `min_size` counts only what is left to train on.
"""

from collections.abc import Callable

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from mpfedcl.data.train_test_split import Indices, count_training
from mpfedcl.errors import InvalidInput
from mpfedcl.rng import numpy_generator

MOST_DRAWS = 20_000
_MOST_DRAWS_AT_ONCE = 64
_MOST_CELLS_AT_ONCE = 1_000_000

Floats = NDArray[numpy.float64]
DrawCounts = Callable[[int], Indices]
"""Takes a number of draws and returns counts [draws, clients, classes]."""


def partition_iid(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Split the images at random into shares that differ by one image at most."""
    _refuse_impossible(labels, num_clients, min_size, test_fraction)
    generator = numpy_generator(seed, "partition", "iid")
    owners = numpy.arange(len(labels)) * num_clients // len(labels)
    sizes = numpy.bincount(owners, minlength=num_clients)

    def draw(num_draws: int) -> Indices:
        return numpy.stack([_draw_label_counts(labels, sizes, generator) for _ in range(num_draws)])

    counts = _redraw(draw, labels, num_clients, min_size, test_fraction, "iid", None)
    return _assign_images(labels, counts, generator)


def partition_by_label(
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
    none of the next class; the shares of the others are scaled up, and drawn again where they are
    all zero.
    """
    _refuse_impossible(labels, num_clients, min_size, test_fraction)
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
            shares = _draw_shares(is_open, alpha, generator)
            drawn = _round_shares(shares, int(class_sizes[label]))
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

    counts = _redraw(draw, labels, num_clients, min_size, test_fraction, "label", alpha)
    return _assign_images(labels, counts, generator)


def partition_by_quantity(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    alpha: float,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Split the images at random by shares of the whole from a Dirichlet distribution."""
    _refuse_impossible(labels, num_clients, min_size, test_fraction)
    generator = numpy_generator(seed, "partition", "quantity")
    num_classes = int(labels.max()) + 1
    everyone = numpy.ones((1, num_clients), dtype=bool)

    def draw_once() -> Indices:
        sizes = _round_shares(_draw_shares(everyone, alpha, generator), len(labels))[0]
        if sizes.min() < min_size:
            return numpy.zeros((num_clients, num_classes), dtype=numpy.int64)
        return _draw_label_counts(labels, sizes, generator)

    def draw(num_draws: int) -> Indices:
        return numpy.stack([draw_once() for _ in range(num_draws)])

    counts = _redraw(draw, labels, num_clients, min_size, test_fraction, "quantity", alpha)
    return _assign_images(labels, counts, generator)


def partition_by_classes(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    classes_per_client: int,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Give each client a few classes, and each class's images in equal shares to its holders.

    Classes are spread evenly: the numbers of their holders differ by one at most. Where there are
    more classes than clients * classes_per_client, the classes that nobody holds are left out.
    """
    _refuse_impossible(labels, num_clients, min_size, test_fraction)
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
        for client in range(num_clients):
            # The classes with the fewest holders; the fraction only breaks ties.
            order = numpy.argsort(num_holders + generator.random(num_holders.shape), axis=1)
            numpy.put_along_axis(holds[:, client], order[:, :classes_per_client], True, axis=1)
            num_holders += holds[:, client]
        share, extra = numpy.divmod(class_sizes[present], numpy.maximum(1, num_holders))
        rank = numpy.cumsum(holds, axis=1) - 1
        counts = numpy.zeros((num_draws, num_clients, len(class_sizes)), dtype=numpy.int64)
        counts[:, :, present] = holds * (share[:, None, :] + (rank < extra[:, None, :]))
        return counts

    counts = _redraw(draw, labels, num_clients, min_size, test_fraction, "classes", None)
    return _assign_images(labels, counts, generator)


def _refuse_impossible(
    labels: Indices, num_clients: int, min_size: int, test_fraction: float | None
) -> None:
    """Refuse at once what no draw can give."""
    if num_clients > len(labels):
        raise InvalidInput(
            f"clients is {num_clients}; it must be at most {len(labels):,}, the number of images "
            "to split."
        )
    most = len(labels)
    held_out = ""
    if test_fraction is not None:
        # Rounding and "at least one" add less than one image for each client and class.
        cells = num_clients * len(numpy.unique(labels))
        most = min(most, int(len(labels) * (1 - test_fraction)) + cells)
        held_out = f" with dataset.test_fraction {test_fraction:g} held out"
    if num_clients * min_size > most:
        raise InvalidInput(
            f"partition.min_size is {min_size:,}; it must be at most {most // num_clients:,} for "
            f"clients {num_clients:,} and {len(labels):,} images{held_out}."
        )


def _redraw(
    draw: DrawCounts,
    labels: Indices,
    num_clients: int,
    min_size: int,
    test_fraction: float | None,
    kind: str,
    alpha: float | None,
) -> Indices:
    """Return the first drawn table [clients, classes] with enough training images for everyone."""
    cells = num_clients * (int(labels.max()) + 1)
    largest = max(1, min(_MOST_DRAWS_AT_ONCE, _MOST_CELLS_AT_ONCE // cells))
    drawn, at_once = 0, 1
    while drawn < MOST_DRAWS:
        at_once = min(at_once, largest, MOST_DRAWS - drawn)
        counts = draw(at_once)
        training = count_training(counts, test_fraction).sum(axis=2)
        enough = numpy.flatnonzero((training >= min_size).all(axis=1))
        if len(enough):
            table: Indices = counts[enough[0]]
            return table
        drawn += at_once
        at_once *= 2  # the first draw mostly does; many at once are quicker where it does not
    skew = "" if alpha is None else f", partition.alpha {alpha:g}"
    remedy = "" if alpha is None else ", or raise partition.alpha"
    raise InvalidInput(
        f"partition.min_size is {min_size:,}, but none of {MOST_DRAWS:,} draws gave each client "
        f"so many training images (partition.kind {kind}{skew}, clients {num_clients:,}, "
        f"{len(labels):,} images); lower partition.min_size or clients{remedy}."
    )


def _draw_shares(is_open: NDArray[numpy.bool_], alpha: float, generator: Generator) -> Floats:
    """Draw Dirichlet shares over clients for each row; who is not open has none."""
    num_rows, num_clients = is_open.shape
    shares = numpy.zeros((num_rows, num_clients))
    todo = numpy.arange(num_rows)
    while len(todo):
        drawn = generator.dirichlet(numpy.full(num_clients, alpha), size=len(todo))
        shares[todo] = numpy.where(is_open[todo], drawn, 0.0)
        todo = todo[shares[todo].sum(axis=1) == 0]
    return shares


def _round_shares(shares: Floats, total: int) -> Indices:
    """Cut `total` images into whole numbers by each row's shares (of any positive sum)."""
    ends = numpy.cumsum(shares, axis=1)
    # Dividing by the last end makes it exactly 1, so that a client without a share gets nothing.
    # Rounded, not cut off: cutting off would give the leftover single images to the last client.
    cuts = numpy.rint(ends / ends[:, -1:] * total).astype(numpy.int64)
    return numpy.diff(cuts, axis=1, prepend=0)


def _draw_label_counts(labels: Indices, sizes: Indices, generator: Generator) -> Indices:
    """Count the labels [clients, classes] of a random split with the given sizes."""
    num_classes = int(labels.max()) + 1
    owners = numpy.repeat(numpy.arange(len(sizes)), sizes)
    cells = owners * num_classes + generator.permutation(labels)
    return numpy.bincount(cells, minlength=len(sizes) * num_classes).reshape(len(sizes), -1)


def _assign_images(labels: Indices, counts: Indices, generator: Generator) -> list[Indices]:
    """Assign the images of each class at random by the counts; each client's in ascending order."""
    num_clients = len(counts)
    owners = numpy.full(len(labels), num_clients)
    for label in numpy.flatnonzero(counts.sum(axis=0)):
        members = generator.permutation(numpy.flatnonzero(labels == label))
        clients = numpy.repeat(numpy.arange(num_clients), counts[:, label])
        owners[members[: len(clients)]] = clients
    by_owner = numpy.argsort(owners, kind="stable")
    ends = numpy.cumsum(numpy.bincount(owners, minlength=num_clients + 1))[:num_clients]
    return [numpy.asarray(own) for own in numpy.split(by_owner, ends)[:num_clients]]
