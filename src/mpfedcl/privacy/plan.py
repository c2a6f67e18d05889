"""Planning of a privacy budget: the noise of a run, computed from sizes before data is read."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian.mechanism import PrivateSums
from mpfedcl.privacy.accounting import calibrate_multiplier

_USEFUL_MEANS = 0.5
"""Largest useful error of a class mean, relative to the norm of features
(docs/differential-privacy.md)."""
_USEFUL_MOMENTS = 3.0
"""Largest noise over mean eigenvalue at which second moments improve on means."""
_USEFUL_MODEL = 2.0
"""Largest noise over clip at which a model loses only a few points."""


@dataclass(frozen=True)
class SumsPlan:
    """One-shot statistics under a budget."""

    epsilon: float
    sigma_means: float
    """Standard deviation of the noise in counts and sums, if only means are sent."""
    means_error: float
    """Expected norm of the error of a class mean, for features of norm 1."""
    sigma_moments: float
    """The same if second moments are sent too."""
    moment_sigma: float
    """Standard deviation in the second moment, off its diagonal."""
    moments_error: float
    """Largest eigenvalue of the moment's noise over the moment's mean eigenvalue."""
    advice: Literal["nothing", "means", "moments"]


@dataclass(frozen=True)
class RoundsPlan:
    """Rounds of training under a budget."""

    epsilon: float
    multiplier: float
    """Noise over clip in the sum of a round."""
    model_error: float
    """Expected norm of the noise in the mean change, relative to the clip."""
    clients_needed: int
    """The number of clients at which the error would be 1."""
    advice: Literal["nothing", "model"]


@dataclass(frozen=True)
class Plan:
    """The sizes of the planned run."""

    unit: Literal["record", "client"]
    delta: float
    images: int
    clients: int
    classes: int
    dimensions: int
    """Of a projected feature."""
    rounds: int = 0
    """0 for a one-shot method."""
    fraction: float = 1.0
    parameters: int = 100_000
    model: Literal["central", "local"] = "central"
    clip: float | None = None
    """Unit client: largest norm of a client's statistics."""

    def __post_init__(self) -> None:
        least = {"images": 1, "clients": 1, "classes": 1, "dimensions": 1, "parameters": 1}
        for name, value in {**least, "rounds": 0}.items():
            if getattr(self, name) < value:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least {value}.")
        if not 0 < self.fraction <= 1:
            raise InvalidInput(f"fraction is {self.fraction:g}; it must be above 0 and at most 1.")
        if self.rounds and self.unit == "record":
            raise InvalidInput(
                "unit is 'record'; with rounds it must be client: only one-shot statistics can be "
                "kept private for single images."
            )

    def for_sums(self, epsilons: Sequence[float]) -> list[SumsPlan]:
        """Return the plan of a one-shot method for each epsilon."""
        return list(map(self._plan_sums, epsilons))

    def for_rounds(self, epsilons: Sequence[float]) -> list[RoundsPlan]:
        """Return the plan of all rounds for each epsilon."""
        return list(map(self._plan_rounds, epsilons))

    def _plan_sums(self, epsilon: float) -> SumsPlan:
        noises = self.clients if self.model == "local" else 1
        means, moments = (self._mechanism(epsilon, has_moments) for has_moments in (False, True))
        per_class = self._kept_share(means) * self.images / self.classes
        means_error = means.sigma * math.sqrt(noises * self.dimensions) / per_class
        # Noise of standard deviation s has eigenvalues up to 2 s sqrt(d); features of norm 1
        # have a moment of trace n.
        stated = moments.deviations(noises)
        largest = 2 * stated["moment"] * math.sqrt(self.dimensions)
        middle = self._kept_share(moments) * self.images / self.dimensions
        advice: Literal["nothing", "means", "moments"] = "means"
        if means_error > _USEFUL_MEANS:
            advice = "nothing"
        elif largest / middle <= _USEFUL_MOMENTS:
            advice = "moments"
        return SumsPlan(
            epsilon,
            means.sigma,
            means_error,
            moments.sigma,
            stated["moment"] / math.sqrt(noises),
            largest / middle,
            advice,
        )

    def _mechanism(self, epsilon: float, has_moments: bool) -> PrivateSums:
        settings = PrivacySettings(
            epsilon=epsilon, delta=self.delta, unit=self.unit, model=self.model, clip=self.clip
        )
        found = PrivateSums.of(settings, has_moments=has_moments)
        assert found is not None
        return found

    def _kept_share(self, mechanism: PrivateSums) -> float:
        """Return the share of an average client's statistics that the clip keeps."""
        if self.unit == "record":
            return 1.0
        each = self.images / self.clients
        # Counts and sums of C classes with each / C images: sqrt(2 / C) times as many as images.
        norm = each * math.sqrt(2 / self.classes)
        return min(1.0, mechanism.sensitivity / norm)

    def _plan_rounds(self, epsilon: float) -> RoundsPlan:
        multiplier = calibrate_multiplier(epsilon, self.delta, self.rounds, sampling=self.fraction)
        needed = multiplier * math.sqrt(self.parameters) / self.fraction
        error = needed / self.clients
        advice: Literal["nothing", "model"] = "model" if error <= _USEFUL_MODEL else "nothing"
        return RoundsPlan(epsilon, multiplier, error, math.ceil(needed), advice)


def to_json(plan: Plan, rows: Sequence[SumsPlan | RoundsPlan]) -> dict[str, Any]:
    """Return a plan as plain values."""
    return {**asdict(plan), "budgets": [asdict(row) for row in rows]}
