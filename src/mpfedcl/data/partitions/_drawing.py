"""Shared steps of the partitions by label.

Each first draws a table of counts [clients, classes], again and again until every client has
`min_size` training images, and only then assigns the images of each class at random. Every image
goes to exactly one client; only `classes` leaves out classes that no client holds.

With a `test_fraction`, each client holds out that share of each of its classes for its local test
set (`partition.test` "matched"), and `min_size` counts only the training images.
"""

from collections.abc import Callable

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.samples import Indices, count_training

MOST_DRAWS = 20_000
_MOST_DRAWS_AT_ONCE = 64
_MOST_CELLS_AT_ONCE = 1_000_000
_MOST_CELLS = 2**28
"""Cells in all draws together, so that giving up with many clients takes seconds, not hours."""

Floats = NDArray[numpy.float64]
DrawCounts = Callable[[int], Indices]
"""Takes a number of draws and returns counts [draws, clients, classes]."""


def refuse_impossible(
    labels: Indices, num_clients: int, min_size: int, test_fraction: float | None
) -> None:
    """Reject sizes that no draw can satisfy."""
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


def redraw(
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
    most = min(MOST_DRAWS, max(_MOST_DRAWS_AT_ONCE, _MOST_CELLS // cells))
    drawn, at_once = 0, 1
    while drawn < most:
        at_once = min(at_once, largest, most - drawn)
        counts = draw(at_once)
        training = count_training(counts, test_fraction).sum(axis=2)
        enough = numpy.flatnonzero((training >= min_size).all(axis=1))
        if len(enough):
            table: Indices = counts[enough[0]]
            return table
        drawn += at_once
        at_once *= 2  # usually the first draw suffices; otherwise larger batches are faster
    skew = "" if alpha is None else f", partition.alpha {alpha:g}"
    remedy = "" if alpha is None else ", or raise partition.alpha"
    raise InvalidInput(
        f"partition.min_size is {min_size:,}, but none of {most:,} draws gave each client "
        f"that many training images (partition.kind {kind}{skew}, clients {num_clients:,}, "
        f"{len(labels):,} images); lower partition.min_size or clients{remedy}."
    )


def draw_shares(is_open: NDArray[numpy.bool_], alpha: float, generator: Generator) -> Floats:
    """Draw Dirichlet shares over clients for each row; clients that are not open get none."""
    num_rows, num_clients = is_open.shape
    shares = numpy.zeros((num_rows, num_clients))
    todo = numpy.arange(num_rows)
    while len(todo):
        drawn = generator.dirichlet(numpy.full(num_clients, alpha), size=len(todo))
        shares[todo] = numpy.where(is_open[todo], drawn, 0.0)
        todo = todo[shares[todo].sum(axis=1) == 0]
    return shares


def round_shares(shares: Floats, total: int) -> Indices:
    """Cut `total` images into whole numbers by each row's shares (of any positive sum)."""
    ends = numpy.cumsum(shares, axis=1)
    # Dividing by the last end makes it exactly 1, so that a client without a share gets nothing.
    # Rounded, not cut off: cutting off would give the leftover single images to the last client.
    cuts = numpy.rint(ends / ends[:, -1:] * total).astype(numpy.int64)
    return numpy.diff(cuts, axis=1, prepend=0)


def draw_label_counts(labels: Indices, sizes: Indices, generator: Generator) -> Indices:
    """Count the labels [clients, classes] of a random split with the given sizes."""
    num_classes = int(labels.max()) + 1
    owners = numpy.repeat(numpy.arange(len(sizes)), sizes)
    cells = owners * num_classes + generator.permutation(labels)
    return numpy.bincount(cells, minlength=len(sizes) * num_classes).reshape(len(sizes), -1)


def assign_images(labels: Indices, counts: Indices, generator: Generator) -> list[Indices]:
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
