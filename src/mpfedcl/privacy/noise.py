"""Gaussian noise from the system's entropy, never from an experiment's seed, which is public.

Sums are given to opendp, whose sampler is exact: the bits of a result tell nothing about the number
beneath, as they may with floating point noise (Mironov, 2012). It takes some 50 to 75 microseconds
per number. Models have too many, so theirs is ordinary floating point noise by a generator that is
seeded with 128 bits of entropy.
"""

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.privacy.extra import import_extra


def add_exact_noise(values: Tensor, sigma: float) -> Tensor:
    """Return the values with Gaussian noise of deviation sigma, by opendp; in float64."""
    opendp = import_extra("opendp.prelude")
    opendp.enable_features("contrib")
    domain = opendp.vector_domain(opendp.atom_domain(T=float, nan=False))
    measurement = opendp.m.make_gaussian(domain, opendp.l2_distance(T=float), scale=sigma)
    noisy = measurement(values.detach().double().cpu().flatten().tolist())
    return torch.tensor(noisy, dtype=torch.float64, device=values.device).view(values.shape)


def draw_noise(sigma: float, shape: Sequence[int]) -> Tensor:
    """Return Gaussian noise of deviation sigma, float64, for tensors with many numbers."""
    # Without a seed numpy takes one from the system.
    drawn = numpy.random.default_rng().normal(0.0, sigma, tuple(shape))
    return torch.from_numpy(numpy.asarray(drawn))


def share_sigma(sigma: float, least_honest: int) -> float:
    """Return the deviation of each client's share of the noise in a sum that only all can open.

    Shares add up in their squares: where at least `least_honest` clients that answer add theirs,
    the sum has noise of sigma or more, whatever the others did.
    """
    if least_honest < 1:
        raise InvalidInput(
            f"least_honest is {least_honest}; at least 1 client must add its share of the noise."
        )
    return sigma / math.sqrt(least_honest)
