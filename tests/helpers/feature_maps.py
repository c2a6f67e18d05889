"""The features of one-shot methods, written out with numpy."""

from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.gaussian.statistics import _directions


def features_of(samples: NDArray[Any], count: int = 512) -> NDArray[numpy.float64]:
    """Return the features [n, d + 1 + count] of samples [n, d] of few values."""
    constant = numpy.full((len(samples), 1), samples.shape[1] ** 0.5)
    values = numpy.concatenate([samples.astype("f8"), constant], axis=1)
    roots = numpy.sign(values) * numpy.sqrt(numpy.abs(values))
    direct = roots / numpy.linalg.norm(roots, axis=1, keepdims=True)
    turned = numpy.maximum(direct @ _directions(values.shape[1], count).numpy(), 0)
    turned /= numpy.linalg.norm(turned, axis=1, keepdims=True)
    found: NDArray[numpy.float64] = numpy.concatenate([direct, turned], axis=1) / 2**0.5
    return found
