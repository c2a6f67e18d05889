"""Sums of features by class under a budget: how far one image moves them, noise, and repair.

What is released is one vector v: `counts` [C], `sums` [C, d] and, where second moments are sent,
half of `moment` [d, d]. Features have length 1 at most, so an image that comes or goes moves the
counts by 1, the sums by 1 and half the moment by 1/2: v by sqrt(2), or by 1.5 with moments. Of a
symmetric matrix only one half is released; off the diagonal its numbers stand for two, and count by
the root of 2, so that the length of v is the same as of the whole.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian import moment_from_within, pack_symmetric, unpack_symmetric
from mpfedcl.privacy.gaussian_mechanism import gaussian_multiplier
from mpfedcl.privacy.noise import add_exact_noise

MEANS_SENSITIVITY = math.sqrt(2)
MOMENTS_SENSITIVITY = 1.5
CLIENT_CLIP = 10.0
"""The longest v of one client where the promise is about clients and no clip is given."""
_ROUNDING = 1 + 1e-5
"""Features may come out longer than 1 by single precision."""
_DEVIATIONS = 6.0
"""What noise does not exceed in the lifetime of anybody."""


@dataclass(frozen=True)
class PrivateSums:
    """The Gaussian mechanism on sums.

    Args:
        unit: Whether one image or one client may come or go.
        sensitivity: By how much that moves v.
        sigma: Deviation of the noise in each number of v, wherever it is added.
        is_local: Whether each client adds noise, before anything leaves it.
    """

    unit: Literal["record", "client"]
    sensitivity: float
    sigma: float
    is_local: bool

    @classmethod
    def of(cls, settings: PrivacySettings, *, has_moments: bool) -> "PrivateSums | None":
        """Return what a budget asks for, None without one."""
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
        """Return the same with other noise: a client's share of it in a secure sum."""
        return replace(self, sigma=sigma)

    def bound(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return one client's sums, shortened to the clip where the promise is about clients."""
        tensors = {name: value.double() for name, value in summed.items()}
        if self.unit == "record":
            return tensors
        length = float(_flatten(tensors).norm())
        scale = self.sensitivity / length if length > self.sensitivity else 1.0
        return {name: value * scale for name, value in tensors.items()}

    def add_noise(self, summed: Mapping[str, Tensor]) -> Tensors:
        """Return sums with noise, in float64."""
        tensors = {name: value.double() for name, value in summed.items()}
        return _unflatten(add_exact_noise(_flatten(tensors), self.sigma), tensors)

    def deviations(self, num_noises: float = 1) -> dict[str, float]:
        """Return the noise's deviation in each field, where so many clients have added it."""
        sigma = self.sigma * math.sqrt(num_noises)
        # Off the diagonal; on it, it is 2 sigma.
        return {"counts": sigma, "sums": sigma, "moment": math.sqrt(2) * sigma}

    def find_impossible(self, summed: Mapping[str, Tensor]) -> str | None:
        """Return why no images have these sums with this noise on them, or None if some may."""
        counts, sums = summed["counts"].double(), summed["sums"].double()
        slack = _DEVIATIONS * self.sigma
        if bool((counts < -slack).any()):
            return f"class {int(counts.argmin())} has the count {counts.min():.4g}, below any noise"
        # The length of d noises is sigma sqrt(d), give or take some sigma.
        lengths = sums.norm(dim=1) - self.sigma * math.sqrt(sums.shape[1]) - slack
        over = lengths - counts.clamp(min=0) - slack
        if bool((over > 0).any()):
            label = int(over.argmax())
            return (
                f"the sum of class {label} has length {sums[label].norm():.4g}; with its count, "
                f"{counts[label]:.4g}, no noise makes it so long"
            )
        return None

    def repair(self, noisy: Mapping[str, Tensor], num_noises: float = 1) -> Tensors:
        """Return statistics that images could have: `counts`, `sums` and `moment` [d, d].

        It looks at noisy numbers alone, so it costs nothing of the budget: counts become whole and
        those within two deviations of 0 become 0, sums no longer than counts, the scatter within
        classes positive semidefinite, and not below what noise looks like. Without second moments
        the scatter is alike in all directions, with the trace that the class means leave.
        """
        sigma = self.sigma * math.sqrt(num_noises)
        counts = noisy["counts"].double()
        counts = counts.round().where(counts > 2 * sigma, torch.zeros_like(counts))
        sums = noisy["sums"].double() * (counts > 0).unsqueeze(1)
        lengths = sums.norm(dim=1, keepdim=True)
        sums = sums * (counts.unsqueeze(1) / lengths.clamp(min=1e-300)).clamp(max=1)
        size = sums.shape[1]
        between = moment_from_within(sums.new_zeros(size, size), counts, sums)
        rest = (counts.sum() - between.trace()).clamp(min=0)
        if "moment" not in noisy:
            within = torch.eye(size, dtype=sums.dtype, device=sums.device) * rest / size
            return {"counts": counts, "sums": sums, "moment": between + within}
        scatter = unpack_symmetric(noisy["moment"].double(), size) - between
        return {"counts": counts, "sums": sums, "moment": between + _lift(scatter, sigma)}


def _lift(scatter: Tensor, sigma: float) -> Tensor:
    """Return a scatter whose directions are all at least as wide as noise makes them."""
    spectrum, basis = torch.linalg.eigh(scatter)
    # The largest eigenvalue of a symmetric matrix of noise: 2 sqrt(d) times its deviation.
    floor = 2 * math.sqrt(len(scatter)) * math.sqrt(2) * sigma
    lifted: Tensor = (basis * spectrum.clamp(min=floor)) @ basis.T
    return lifted


def _flatten(tensors: Tensors) -> Tensor:
    """Return v."""
    parts = [tensors["counts"].flatten(), tensors["sums"].flatten()]
    if "moment" in tensors:
        packed, size = tensors["moment"], tensors["sums"].shape[1]
        parts.append(packed * _weights(size).to(packed) / 2)
    return torch.cat(parts)


def _unflatten(vector: Tensor, like: Tensors) -> Tensors:
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
    """Return what each number of a packed matrix counts: 1 on the diagonal, else sqrt(2)."""
    matrix = torch.full((size, size), math.sqrt(2), dtype=torch.float64)
    return pack_symmetric(matrix.fill_diagonal_(1.0))
