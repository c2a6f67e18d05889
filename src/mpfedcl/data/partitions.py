"""Partitions: which samples, or which domains, each client gets.

A partition is a function `partition(labels, num_clients, *, ...)` in `PARTITION_FUNCTIONS`, or an
entry point in `mpfedcl.partitions`. It returns for each client the positions of its samples among
all labels. Keyword arguments are passed by name: settings of [partition], `seed`, and
`test_fraction`, the share of its samples that each client holds out for its local test set (None:
nothing). A function whose first parameter is `domains`, the names of the domains, returns the
positions of each client's domains instead.

Partitions by label first draw a table of counts [clients, classes], again and again until every
client has `min_size` training images (without those that it holds out), and only then assign the
images of each class at random. Every image goes to exactly one client; only `classes` leaves out
classes that no client holds.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.plugins import entry_points, load
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.samples import Indices, count_training
from mpfedcl.experiment import Experiment

_MOST_LISTED = 12
MOST_DRAWS = 20_000
_MOST_DRAWS_AT_ONCE = 64
_MOST_CELLS_AT_ONCE = 1_000_000
_MOST_CELLS = 2**28
"""Cells in all draws together, so that giving up with many clients takes seconds, not hours."""

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
    generator = numpy_generator(seed, "partition", "iid")
    owners = numpy.arange(len(labels)) * num_clients // len(labels)
    sizes = numpy.bincount(owners, minlength=num_clients)

    def draw(num_draws: int) -> Indices:
        return numpy.stack([draw_label_counts(labels, sizes, generator) for _ in range(num_draws)])

    counts = redraw(draw, labels, num_clients, min_size, test_fraction, "iid", None)
    return assign_images(labels, counts, generator)


def partition_label(
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
            # Draws that can no longer give each client enough are not worth finishing.
            left -= int(class_sizes[label])
            missing = numpy.maximum(0, min_size - training[hopeful]).sum(axis=1)
            hopeful = hopeful[missing <= left]
            if len(hopeful) == 0:
                break
        return counts

    counts = redraw(draw, labels, num_clients, min_size, test_fraction, "label", alpha)
    return assign_images(labels, counts, generator)


def partition_quantity(
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    alpha: float,
    min_size: int = 1,
    test_fraction: float | None = None,
) -> list[Indices]:
    """Split the images at random by shares of the whole from a Dirichlet distribution."""
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


def partition_classes(
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


def partition_feature(domains: Sequence[str], num_clients: int | None) -> list[Indices]:
    """Give each client a domain; their number follows from the data."""
    if num_clients not in (None, len(domains)):
        raise InvalidInput(
            f"clients is {num_clients}; under partition.kind feature it must be "
            f"{len(domains)}, the number of domains ({enumerate_names(domains, _MOST_LISTED)}), "
            "or left out."
        )
    return [numpy.array([number]) for number in range(len(domains))]


def partition_natural(
    domains: Sequence[str], num_clients: int | None, *, seed: int
) -> list[Indices]:
    """Give each client a domain, such as a writer; with fewer clients, not all are drawn."""
    count = len(domains) if num_clients is None else num_clients
    if count > len(domains):
        raise InvalidInput(
            f"clients is {count:,}; under partition.kind natural it must be at most "
            f"{len(domains):,}, the number of domains, or left out."
        )
    generator = numpy_generator(seed, "partition", "natural")
    drawn = numpy.sort(generator.choice(len(domains), count, replace=False))
    return [numpy.array([number]) for number in drawn]


PARTITION_FUNCTIONS: dict[str, Callable[..., list[Indices]]] = {
    "iid": partition_iid,
    "label": partition_label,
    "quantity": partition_quantity,
    "classes": partition_classes,
    "feature": partition_feature,
    "natural": partition_natural,
}
"""The built-in partitions by name."""


def divide(
    what: Indices | Sequence[str], experiment: Experiment, test_fraction: float | None = None
) -> list[Indices]:
    """Divide samples, given by their labels, or domains as the experiment's partition does."""
    settings = experiment.partition
    if settings.kind in PARTITION_FUNCTIONS:
        partition = PARTITION_FUNCTIONS[settings.kind]
    else:
        partition = load(entry_points("mpfedcl.partitions")[settings.kind], "partition.kind")
    known: dict[str, Any] = {
        **dict(settings),
        "seed": experiment.seed,
        "min_size": settings.min_size or 1,
        "test_fraction": test_fraction,
    }
    wanted = inspect.signature(partition).parameters
    return partition(
        what, experiment.clients, **{name: known[name] for name in wanted if name in known}
    )


def _reject_impossible(
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
    """Return the first drawn table [clients, classes] with enough training images for all."""
    _reject_impossible(labels, num_clients, min_size, test_fraction)
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
