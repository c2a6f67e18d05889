"""Fixed-point encoding: values as integers modulo 2^64, whose sums are exact in any order.

A real x is sent as round(x 2^24). The values of n clients must lie in ±2^38/n, so that no sum
leaves ±2^38; integers are sent unchanged, in ±2^62/n. Larger values are rejected, never clipped.
"""

from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput

FRACTION_BITS = 24
"""The sum of n clients is exact to n 2^-25."""
_SUM_BITS = 62
"""Bits of the largest sum; of the other two, one is the sign and one detects impossible sums."""

Ring = NDArray[numpy.uint64]
"""Integers modulo 2^64."""


class OutOfRange(InvalidInput):
    """Raised for a value too large for secure aggregation."""


def largest(num_clients: int, *, is_whole: bool = False) -> float:
    """Return the largest value that each of `num_clients` clients may send.

    Example:
        >>> largest(4), largest(4, is_whole=True) == 2**60
        (68719476736.0, True)
    """
    bits = _SUM_BITS if is_whole else _SUM_BITS - FRACTION_BITS
    return 2.0**bits / num_clients


def encode(name: str, values: NDArray[Any], num_clients: int) -> Ring:
    """Return values as flat integers modulo 2^64; raise OutOfRange with the name."""
    is_whole = values.dtype.kind in "iub"
    flat = values.reshape(-1)
    bound = largest(num_clients, is_whole=is_whole)
    size = float(numpy.abs(flat.astype(numpy.float64)).max(initial=0.0))
    # Written so that NaN is rejected too.
    if not size <= bound:
        raise OutOfRange(
            f"{name} contains {size:.4g}; with secure aggregation of {num_clients} clients it must "
            f"be finite and at most {bound:.4g}."
        )
    if not is_whole:
        flat = numpy.rint(flat.astype(numpy.float64) * 2.0**FRACTION_BITS)
    return flat.astype(numpy.int64).view(numpy.uint64)


def decode(total: Ring, *, is_whole: bool = False) -> NDArray[Any]:
    """Return a sum as int64, or as float64 if reals were encoded."""
    signed = total.view(numpy.int64)
    return signed.copy() if is_whole else signed.astype(numpy.float64) / 2.0**FRACTION_BITS


def is_possible(total: Ring) -> bool:
    """Return whether this is a possible sum of values in range."""
    signed = total.view(numpy.int64)
    # Each client's bound is rounded to 53 bits.
    bound = 2**_SUM_BITS + 2**11
    return not len(signed) or bool((signed <= bound).all() and (signed >= -bound).all())
