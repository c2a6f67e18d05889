"""A round as the bounds see it: plain numbers, so that records hold all that is judged."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from mpfedcl.convergence.measurement import Inspection, Measurement, finite_or_none, float_of, ratio


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
