"""What a budget costs, told before anything is run: from numbers alone, no data are read."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.privacy.accounting import calibrate_multiplier
from mpfedcl.privacy.private_sums import PrivateSums

_USEFUL_MEANS = 0.5
"""Error of a class mean, in features' lengths, up to which it was of use where it was measured
(docs/differential-privacy.md)."""
_USEFUL_MOMENTS = 3.0
"""Noise over the mean eigenvalue, up to which second moments were better than means alone."""
_USEFUL_MODEL = 2.0
"""Noise over the longest change, up to which a model lost only a few points."""


@dataclass(frozen=True)
class SumsPlan:
    """One exchange of sums under a budget."""

    epsilon: float
    sigma_means: float
    """Deviation of the noise in each count, and in each number of a sum, of means alone."""
    means_error: float
    """Expected length of the error of a class mean, where features have length 1."""
    sigma_moments: float
    """Deviation in counts and sums where second moments are sent too."""
    moment_sigma: float
    """The same in each number of the moment, off its diagonal."""
    moments_error: float
    """Largest eigenvalue of the moment's noise over the moment's mean eigenvalue."""
    advice: Literal["nothing", "means", "moments"]


@dataclass(frozen=True)
class RoundsPlan:
    """Rounds of training under a budget."""

    epsilon: float
    multiplier: float
    """Noise over the clip, in the sum of a round."""
    model_error: float
    """Expected length of the noise in the mean change, over the longest change of a client."""
    clients_needed: int
    """With so many clients of the same fraction it would be 1."""
    advice: Literal["nothing", "model"]


@dataclass(frozen=True)
class Plan:
    """What is planned for.

    Args:
        unit: record (one exchange) or client.
        images, clients, classes: In all.
        dimensions: Of a feature after projection.
        rounds: 0 for one exchange of sums.
        fraction: Of the clients that train in a round, drawn anew each round.
        parameters: Numbers of the model that rounds train.
        model: Who adds the noise to sums.
        clip: Unit client: the longest contribution of a client to sums.
    """

    unit: Literal["record", "client"]
    delta: float
    images: int
    clients: int
    classes: int
    dimensions: int
    rounds: int = 0
    fraction: float = 1.0
    parameters: int = 100_000
    model: Literal["central", "local"] = "central"
    clip: float | None = None

    def __post_init__(self) -> None:
        least = {"images": 1, "clients": 1, "classes": 1, "dimensions": 1, "parameters": 1}
        for name, value in {**least, "rounds": 0}.items():
            if getattr(self, name) < value:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least {value}.")
        if not 0 < self.fraction <= 1:
            raise InvalidInput(f"fraction is {self.fraction:g}; it must be above 0 and at most 1.")
        if self.rounds and self.unit == "record":
            raise InvalidInput(
                "unit is 'record'; with rounds it must be client: only sums of one exchange can be "
                "kept private for single images."
            )

    def for_sums(self, epsilons: Sequence[float]) -> list[SumsPlan]:
        """Return what each epsilon costs in one exchange."""
        return [self._plan_sums(epsilon) for epsilon in epsilons]

    def for_rounds(self, epsilons: Sequence[float]) -> list[RoundsPlan]:
        """Return what each epsilon costs over all rounds."""
        return [self._plan_rounds(epsilon) for epsilon in epsilons]

    def _plan_sums(self, epsilon: float) -> SumsPlan:
        noises = self.clients if self.model == "local" else 1
        means, moments = (self._mechanism(epsilon, has_moments) for has_moments in (False, True))
        per_class = self._kept_share(means) * self.images / self.classes
        means_error = means.sigma * math.sqrt(noises * self.dimensions) / per_class
        # Noise of deviation s makes eigenvalues up to 2 s sqrt(d); features of length 1 have a
        # moment of trace n.
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
        """Return what the clip leaves of a client with an even share of all images and classes."""
        if self.unit == "record":
            return 1.0
        each = self.images / self.clients
        # Counts and sums of C classes with each / C images: sqrt(2 / C) times as many as images.
        length = each * math.sqrt(2 / self.classes)
        return min(1.0, mechanism.sensitivity / length)

    def _plan_rounds(self, epsilon: float) -> RoundsPlan:
        multiplier = calibrate_multiplier(
            epsilon, self.delta, {1.0: self.rounds}, sampling=self.fraction
        )
        needed = multiplier * math.sqrt(self.parameters) / self.fraction
        error = needed / self.clients
        return RoundsPlan(
            epsilon,
            multiplier,
            error,
            math.ceil(needed),
            "model" if error <= _USEFUL_MODEL else "nothing",
        )


def to_json(plan: Plan, rows: Sequence[SumsPlan | RoundsPlan]) -> dict[str, Any]:
    """Return a plan as plain values."""
    return {**asdict(plan), "budgets": [asdict(row) for row in rows]}
