"""What is measured of a round: plain numbers, client by client."""

import math
from collections.abc import Mapping
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
    """What is measured of a round: each client, and the gradient of the mean objective."""

    clients: dict[str, Measurement]
    gradient_norm: float
    """|∇L(ω_t)|, ∇L = Σ n_i ∇L_i(ω_t) / Σ n_i over these clients; NaN without any."""


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
