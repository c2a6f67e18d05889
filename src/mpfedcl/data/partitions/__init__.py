"""Partitions by name: one file in this folder, or an entry point in `mpfedcl.partitions`.

The function `partition(labels, num_clients, *, ...)` returns for each client the positions of its
samples among all labels. Keyword arguments are passed by name: settings of [partition], `seed`, and
`test_fraction`, the share of its samples that each client holds out for its local test set (None:
nothing). A function whose first parameter is `domains`, the names of the domains, returns the
positions of each client's domains instead.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mpfedcl.core.plugins import entry_points, load
from mpfedcl.data.samples import Indices
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import PARTITIONS


def divide(
    what: Indices | Sequence[str], experiment: Experiment, test_fraction: float | None = None
) -> list[Indices]:
    """Divide samples, given by their labels, or domains as the experiment's partition does."""
    settings = experiment.partition
    partition = _find(settings.kind)
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


def _find(kind: str) -> Callable[..., list[Indices]]:
    found: Callable[..., list[Indices]]
    if kind in PARTITIONS:
        found = importlib.import_module(f"{__name__}.{kind.replace('-', '_')}").partition
    else:
        found = load(entry_points("mpfedcl.partitions")[kind], "partition.kind")
    return found
