"""The Gaussian mechanism: calibration in closed form, noise, and private sufficient statistics.

The multiplier z is the standard deviation of the noise over the sensitivity, the L2 norm by which
one image (or one client) can change the release. By Balle and Wang (2018) the mechanism is
(epsilon, delta)-private if and only if

    Phi(1/(2z) - epsilon z) - exp(epsilon) Phi(-1/(2z) - epsilon z) <= delta.

Noise comes from the system's entropy, never from an experiment's seed, which is public. Statistics
get exact noise by opendp: floating-point noise may reveal bits of the value beneath (Mironov,
2012). It takes 50 to 75 microseconds per value, too much for models; these get floating-point noise
from a generator that is seeded with 128 bits of entropy.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import torch
from scipy.special import log_ndtr
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian.statistics import between_classes, pack_symmetric, unpack_symmetric


def import_extra(module: str) -> Any:
    """Import a module of the extra `privacy`, or explain how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(
            f"privacy.epsilon is given, which needs {error.name or module}; it must be installed: "
            "pip install 'mpfedcl[privacy]'."
        ) from None


def require_extra() -> None:
    """Check that the extra `privacy` is installed."""
    for module in ("dp_accounting", "opendp"):
        import_extra(module)


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """Return the smallest delta at which noise of this multiplier is (epsilon, delta)-private."""
    half = 1 / (2 * multiplier)
    first = float(log_ndtr(half - epsilon * multiplier))
    second = epsilon + float(log_ndtr(-half - epsilon * multiplier))
    # exp(first) - exp(second) without cancellation.
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Return the epsilon that noise of this multiplier costs at a delta.

    Example:
        >>> round(gaussian_epsilon(1.5, 1e-5), 3)
        2.753
    """
    if gaussian_delta(multiplier, 0.0) <= delta:
        return 0.0
    return _find_least(lambda epsilon: gaussian_delta(multiplier, epsilon) <= delta)


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Return the least noise over sensitivity that keeps a budget.

    Example:
        >>> round(gaussian_multiplier(3.0, 1e-5), 3)
        1.391
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise InvalidInput(
            f"epsilon is {epsilon:g} and delta {delta:g}; epsilon must be above 0 and delta "
            "between 0 and 1."
        )
    return _find_least(lambda multiplier: gaussian_delta(multiplier, epsilon) <= delta)


def composed_multiplier(multipliers: Mapping[float, int]) -> float:
    """Return the multiplier of one release that costs as much as {multiplier: releases}."""
    return 1 / math.sqrt(sum(count / each**2 for each, count in multipliers.items()))


def _find_least(holds: Callable[[float], bool]) -> float:
    """Return the least positive value at which a monotone condition holds, by bisection."""
    low, high = 0.0, 1.0
    while not holds(high):
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def add_exact_noise(values: Tensor, sigma: float) -> Tensor:
    """Return float64 values with exact Gaussian noise of standard deviation sigma."""
    opendp = import_extra("opendp.prelude")
    opendp.enable_features("contrib")
    domain = opendp.vector_domain(opendp.atom_domain(T=float, nan=False))
    measurement = opendp.m.make_gaussian(domain, opendp.l2_distance(T=float), scale=sigma)
    noisy = measurement(values.detach().double().cpu().flatten().tolist())
    return torch.tensor(noisy, dtype=torch.float64, device=values.device).view(values.shape)


def add_exact_counts(counts: Sequence[int], epsilon: float) -> list[int]:
    """Return counts with discrete Laplace noise: epsilon-private if a sample is in one of them."""
    opendp = import_extra("opendp.prelude")
    opendp.enable_features("contrib")
    domain = opendp.vector_domain(opendp.atom_domain(T=int))
    measurement = opendp.m.make_laplace(domain, opendp.l1_distance(T=int), scale=1 / epsilon)
    return [int(each) for each in measurement(list(counts))]


def draw_noise(sigma: float, shape: Sequence[int]) -> Tensor:
    """Return float64 Gaussian noise of standard deviation sigma, for large tensors."""
    # Without a seed numpy takes one from the system.
    drawn = numpy.random.default_rng().normal(0.0, sigma, tuple(shape))
    return torch.from_numpy(numpy.asarray(drawn))


def share_sigma(sigma: float, least_honest: int) -> float:
    """Return the standard deviation of each client's share of the noise in a secure sum.

    Variances add up: the shares of `least_honest` clients have a standard deviation of sigma.
    """
    return sigma / math.sqrt(least_honest)


MEANS_SENSITIVITY = math.sqrt(2)
MOMENTS_SENSITIVITY = 1.5
CLIENT_CLIP = 10.0
"""The default of `privacy.clip` for a client's statistics."""
_ROUNDING = 1 + 1e-5
"""Tolerance for feature norms above 1 by float32 rounding."""
_DEVIATIONS = 6.0
"""Standard deviations that noise practically never exceeds."""


@dataclass(frozen=True)
class PrivateSums:
    """The Gaussian mechanism on sufficient statistics: `counts`, `sums` and `moment`.

    The release is one vector v: `counts` [C], `sums` [C, d] and, if second moments are sent, half
    of `moment` [d, d]. Features have norm at most 1, so adding or removing an image changes the
    counts by 1, the sums by 1 and half the moment by 1/2: v by sqrt(2), or by 1.5 with moments. Of
    the symmetric moment one triangle is released; its off-diagonal values are scaled by sqrt(2), so
    that v has the norm of the whole matrix.

    Args:
        unit: Whether one image or one client is added or removed.
        sensitivity: The change of v in the L2 norm.
        sigma: Standard deviation of the noise in each value of v.
        is_local: Whether each client adds noise to its own statistics.
    """

    unit: Literal["record", "client"]
    sensitivity: float
    sigma: float
    is_local: bool

    @classmethod
    def of(cls, settings: PrivacySettings, *, has_moments: bool) -> "PrivateSums | None":
        """Return the mechanism of a budget, None without one."""
        if settings.epsilon is None:
            return None
        unit = settings.unit_for(trains=False)
        sensitivity = MOMENTS_SENSITIVITY if has_moments else MEANS_SENSITIVITY
        if unit == "client":
            sensitivity = settings.clip or CLIENT_CLIP
        multiplier = gaussian_multiplier(settings.epsilon, settings.delta) * (1 + 1e-9)
        sigma = multiplier * sensitivity * _ROUNDING
        return cls(unit, sensitivity, sigma, settings.model == "local")

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity, for the accountant."""
        return self.sigma / (self.sensitivity * _ROUNDING)

    def with_share(self, sigma: float) -> "PrivateSums":
        """Return the mechanism with another sigma, such as a client's share in a secure sum."""
        return replace(self, sigma=sigma)

    def bound(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return one client's statistics, clipped if the unit is client."""
        tensors = {name: value.double() for name, value in summed.items()}
        if self.unit == "record":
            return tensors
        norm = float(_flatten(tensors).norm())
        scale = self.sensitivity / norm if norm > self.sensitivity else 1.0
        return {name: value * scale for name, value in tensors.items()}

    def add_noise(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return statistics with noise, in float64."""
        return _unflatten(add_exact_noise(_flatten(summed), self.sigma), summed)

    def deviations(self, num_noises: float = 1) -> dict[str, float]:
        """Return the standard deviation of the noise in each field, if added `num_noises` times."""
        sigma = self.sigma * math.sqrt(num_noises)
        # Off the diagonal; on it, it is 2 sigma.
        return {"counts": sigma, "sums": sigma, "moment": math.sqrt(2) * sigma}

    def find_impossible(self, summed: Mapping[str, Tensor]) -> str | None:
        """Return why these noisy statistics are impossible, or None."""
        counts, sums = summed["counts"].double(), summed["sums"].double()
        slack = _DEVIATIONS * self.sigma
        if bool((counts < -slack).any()):
            return f"class {int(counts.argmin())} has the count {counts.min():.4g}, below any noise"
        # The norm of the noise in d values is sigma sqrt(d), give or take some sigma.
        lengths = sums.norm(dim=1) - self.sigma * math.sqrt(sums.shape[1]) - slack
        over = lengths - counts.clamp(min=0) - slack
        if bool((over > 0).any()):
            label = int(over.argmax())
            return (
                f"the sum of class {label} has the norm {sums[label].norm():.4g}; with the count "
                f"{counts[label]:.4g}, noise does not explain it"
            )
        return None

    def repair(self, noisy: Mapping[str, Tensor], num_noises: float = 1) -> Tensors:
        """Return possible statistics: `counts`, `sums` and `moment` [d, d].

        Post-processing of noisy values does not spend budget. Counts are rounded, and 0 within two
        standard deviations of 0; sums have at most the norm of their counts; the scatter within
        classes is positive definite and not below the noise. Without second moments the scatter is
        isotropic, with the trace that the class means leave.
        """
        sigma = self.sigma * math.sqrt(num_noises)
        counts = noisy["counts"].double()
        counts = counts.round().where(counts > 2 * sigma, torch.zeros_like(counts))
        sums = noisy["sums"].double() * (counts > 0).unsqueeze(1)
        lengths = sums.norm(dim=1, keepdim=True)
        sums = sums * (counts.unsqueeze(1) / lengths.clamp(min=1e-300)).clamp(max=1)
        size = sums.shape[1]
        between = between_classes(counts, sums)
        rest = (counts.sum() - between.trace()).clamp(min=0)
        if "moment" not in noisy:
            within = torch.eye(size, dtype=sums.dtype, device=sums.device) * rest / size
            return {"counts": counts, "sums": sums, "moment": between + within}
        scatter = unpack_symmetric(noisy["moment"].double(), size) - between
        return {"counts": counts, "sums": sums, "moment": between + _lift(scatter, sigma)}


def _lift(scatter: Tensor, sigma: float) -> Tensor:
    """Return a scatter with its eigenvalues raised to the level of the noise."""
    spectrum, basis = torch.linalg.eigh(scatter)
    # The largest eigenvalue of symmetric noise: 2 sqrt(d) standard deviations.
    floor = 2 * math.sqrt(len(scatter)) * math.sqrt(2) * sigma
    lifted: Tensor = (basis * spectrum.clamp(min=floor)) @ basis.T
    return lifted


def _flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return v, in float64."""
    parts = [tensors["counts"].double(), tensors["sums"].double().flatten()]
    if "moment" in tensors:
        packed = tensors["moment"].double()
        parts.append(packed * _weights(tensors["sums"].shape[1]).to(packed) / 2)
    return torch.cat(parts)


def _unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors that `_flatten` was given."""
    counts, sums = like["counts"].numel(), like["sums"].numel()
    found = {
        "counts": vector[:counts].view(like["counts"].shape),
        "sums": vector[counts : counts + sums].view(like["sums"].shape),
    }
    if "moment" in like:
        size = like["sums"].shape[1]
        found["moment"] = vector[counts + sums :] * 2 / _weights(size).to(vector)
    return found


def _weights(size: int) -> Tensor:
    """Return the scale of each value of a packed matrix: 1 on the diagonal, else sqrt(2)."""
    matrix = torch.full((size, size), math.sqrt(2), dtype=torch.float64)
    return pack_symmetric(matrix.fill_diagonal_(1.0))
