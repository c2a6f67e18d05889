"""One domain per client."""

from collections.abc import Sequence

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.samples import Indices

_MOST_LISTED = 12


def partition(domains: Sequence[str], num_clients: int | None) -> list[Indices]:
    """Give each client a domain; their number follows from the data."""
    if num_clients not in (None, len(domains)):
        more = f" and {len(domains) - _MOST_LISTED} more" if len(domains) > _MOST_LISTED else ""
        raise InvalidInput(
            f"clients is {num_clients}; under partition.kind feature it must be "
            f"{len(domains)}, the number of domains ({', '.join(domains[:_MOST_LISTED])}{more}), "
            "or left out."
        )
    return [numpy.array([number]) for number in range(len(domains))]
