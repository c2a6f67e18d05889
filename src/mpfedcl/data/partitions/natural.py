"""One client per domain; with `clients`, that many domains drawn by seed."""

from collections.abc import Sequence

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.samples import Indices


def partition(domains: Sequence[str], num_clients: int | None, *, seed: int) -> list[Indices]:
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
