"""What is measured of a round: plain numbers, so that records hold all that is judged."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Measurement:
    """One client in one round. A number that is not defined, or not finite, is NaN; null in JSON.

    The objective L_i is the method's own loss on all of the client's training samples at once.
    """

    num_samples: float
    num_steps: float
    """Steps of the round's training."""
    objective_before: float
    """L_i(ω_t) with the pool that the round began with."""
    objective_after_one_step: float
    """L_i(ω_t - η ∇L_i(ω_t)), same pool: the only step that the theory takes."""
    objective_after_training: float
    """L_i(ω_{t+1}), same pool."""
    objective_after_pool: float
    """L_i(ω_{t+1}) with the pool that the next round begins with; nothing else has changed."""
    objective_after_aggregation: float
    """L_i of what the client would begin the next round with; NaN where no parameter travels."""
    gradient_norm: float
    """|∇L_i(ω_t)|"""
    stochastic_gradient_norm: float
    """Mean of |∇L_i(ω_t; ξ)| over the batches ξ of the round's first epoch, all at ω_t."""
    step: float
    """|ω_{t+1} - ω_t|"""
    smoothness: float
    """|∇L_i(ω_{t+1}) - ∇L_i(ω_t)| / |ω_{t+1} - ω_t|, same pool: L_1 is at least this."""
    slope: float
    """|L_i(ω_{t+1}) - L_i(ω_t)| / |ω_{t+1} - ω_t|, same pool: ζ is at least this."""
    embedding_slope: float
    """Largest |z(ω_{t+1}; x) - z(ω_t; x)| / |Δω_e| over samples x: L_2 is at least this."""
    embedding_length: float
    """Mean of |z(ω_{t+1}; x)| over samples; z is what prototypes are made of."""

    def to_json(self) -> dict[str, float | None]:
        """Return plain values; null where a number is not finite."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned; names of a later version are passed over."""
        return cls(**{each.name: float_of(values[each.name]) for each in fields(cls)})


@dataclass(frozen=True)
class Inspection:
    """What an engine measures of a round: each client, and the gradient of the mean objective."""

    clients: dict[str, Measurement]
    gradient_norm: float
    """|∇L(ω_t)|, ∇L = Σ n_i ∇L_i(ω_t) / Σ n_i over these clients; NaN without any."""


@dataclass(frozen=True)
class RoundMeasurement:
    """A round, with all that the bounds ask for beside the constants."""

    learning_rate: float
    """η: the round's learning rate, of a single step."""
    pool_factor: float
    """A_p * weight / τ; 0 where the loss sees no prototypes, NaN where Lemma 2 says nothing."""
    inspection: Inspection

    @property
    def gradient_norm(self) -> float:
        """|∇L(ω_t)|"""
        return self.inspection.gradient_norm

    @property
    def dissimilarity(self) -> float:
        """E_i |∇L_i(ω_t)|² / |∇L(ω_t)|², clients weighted by samples: δ² is at least this."""
        relative = ratio(self.mean.gradient_norm, self.gradient_norm)
        return relative * relative

    @property
    def mean(self) -> Measurement:
        """The clients' mean by samples; of gradients the root of the mean square."""
        clients = list(self.inspection.clients.values())
        weight = sum(client.num_samples for client in clients)

        def average(values: Iterable[float]) -> float:
            pairs = zip(clients, values, strict=True)
            total = sum(each.num_samples * value for each, value in pairs)
            return total / weight if weight else math.nan

        names = [each.name for each in fields(Measurement)]
        means = {name: average(getattr(each, name) for each in clients) for name in names}
        squares = average(each.gradient_norm * each.gradient_norm for each in clients)
        return Measurement(**means | {"gradient_norm": math.sqrt(squares)})

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "learning_rate": self.learning_rate,
            "pool_factor": finite_or_none(self.pool_factor),
            "gradient_norm": finite_or_none(self.gradient_norm),
            "dissimilarity": finite_or_none(self.dissimilarity),
            "clients": {name: each.to_json() for name, each in self.inspection.clients.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned."""
        clients = {name: Measurement.from_json(each) for name, each in values["clients"].items()}
        return cls(
            values["learning_rate"],
            float_of(values["pool_factor"]),
            Inspection(clients, float_of(values["gradient_norm"])),
        )


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 / 0 is 0: where nothing moved, nothing was seen."""
    if whole == 0:
        return 0.0 if part == 0 else math.nan
    return part / whole


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it."""
    return value if math.isfinite(value) else None


def float_of(value: float | None) -> float:
    """Return a number from JSON."""
    return math.nan if value is None else value
