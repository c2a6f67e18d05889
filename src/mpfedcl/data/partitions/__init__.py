"""The kinds of partition, found by name. A file in this folder with a function is all it takes.

Its function `partition(labels, num_clients, *, ...)` returns the positions of each client's images
among the labels of all. Keyword arguments have the names of what it needs: settings of
[partition], `seed`, and `test_fraction`, the share that each client holds out for its local test set
(None: nothing). One whose first argument is `domains`, the names of the domains, returns the
positions of each client's domains instead.
"""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from mpfedcl.data.samples import Indices
from mpfedcl.experiment import Experiment


def divide(
    what: Indices | Sequence[str], experiment: Experiment, test_fraction: float | None = None
) -> list[Indices]:
    """Divide images, given by their labels, or domains as the experiment's partition does."""
    settings = experiment.partition
    module = importlib.import_module(f"{__name__}.{settings.kind.replace('-', '_')}")
    known: dict[str, Any] = {
        **dict(settings),
        "seed": experiment.seed,
        "min_size": settings.min_size or 1,
        "test_fraction": test_fraction,
    }
    wanted = inspect.signature(module.partition).parameters
    given = {name: value for name, value in known.items() if name in wanted}
    divided: list[Indices] = module.partition(what, experiment.clients, **given)
    return divided
