"""What the server sees of one client cannot be told from random numbers."""

import numpy
import pytest
from protocol_runs import NAMES, Sum
from scipy.stats import chi2

from mpfedcl.privacy.secure_aggregation.primitives import Ring, encode

_RUNS, _SIZE = 40, 256


def _p_value(seen: Ring) -> float:
    """Return how likely numbers as uneven as these are, by counts of each byte at each place."""
    counts = numpy.stack(
        [
            numpy.bincount(column, minlength=256)
            for column in seen.view(numpy.uint8).reshape(-1, 8).T
        ]
    )
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, 8 * 255))


def _views(numbers: dict[str, Ring], *, masked: bool) -> Ring:
    views = []
    for _ in range(_RUNS):
        running = Sum(numbers)
        running.share()
        running.mask()
        views.append(running.seen["ana"] if masked else numbers["ana"])
    return numpy.concatenate(views)


@pytest.mark.whole
def test_view_is_uniform_and_the_test_can_fail() -> None:
    weights = numpy.random.default_rng(0).normal(size=(len(NAMES), _SIZE)) * 400
    numbers = {n: encode("x", row, len(NAMES)) for n, row in zip(NAMES, weights, strict=True)}
    # Over many runs of the same numbers; a fault would show with p far below any level.
    assert _p_value(_views(numbers, masked=True)) > 1e-6
    assert _p_value(_views(numbers, masked=False)) < 1e-100


@pytest.mark.whole
def test_view_does_not_depend_on_the_values() -> None:
    """Of zeros and of large numbers the differences to each other are as uniform."""
    zeros = {name: numpy.zeros(_SIZE, dtype=numpy.uint64) for name in NAMES}
    large = {name: numpy.full(_SIZE, 2**60, dtype=numpy.uint64) for name in NAMES}
    difference = _views(zeros, masked=True) - _views(large, masked=True)
    assert _p_value(difference) > 1e-6


def test_masks_remain_when_others_collude() -> None:
    """Two of five tell the server all they know: what is left of ana's numbers is still masked."""
    numbers = {name: numpy.zeros(_SIZE, dtype=numpy.uint64) for name in NAMES}
    views = []
    for _ in range(_RUNS):
        running = Sum(numbers)
        running.share()
        running.mask()
        known = running.seen["ana"] + running.seen["di"] + running.seen["ed"]
        views.append(known)
    assert _p_value(numpy.concatenate(views)) > 1e-6
