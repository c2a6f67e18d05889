"""The paper's bounds as arithmetic: Lemmas 1 and 2, Theorem 1 and Corollary 1, for one client."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from mpfedcl.convergence.measurement import (
    Inspection,
    Measurement,
    finite_or_none,
    float_of,
    ratio,
)

BOUNDS = {
    "lemma_1": "Lemma 1: training lowers L enough",
    "lemma_2": "Lemma 2: the new pool raises L little",
    "theorem_1": "Theorem 1: both together",
    "corollary_1": "Corollary 1: its condition on η is met",
    "lemma_1_one_step": "Lemma 1 for one plain step of η",
    "descent_one_step": "textbook: one plain step, own gradient",
    "falls_in_training": "L falls in training",
    "falls_over_round": "L falls over the round, new pool included",
    "falls_to_average": "L falls from one global model to the next",
}
"""What is judged, in a few words each."""


@dataclass(frozen=True)
class RoundMeasurement:
    """A round, with all that the bounds ask for beside the constants."""

    learning_rate: float
    """η: the round's learning rate, of a single step."""
    pool_factor: float
    """A_p * weight / τ; 0 where the loss sees no prototypes, NaN where Lemma 2 says nothing."""
    inspection: Inspection

    @property
    def dissimilarity(self) -> float:
        """E_i |∇L_i(ω_t)|² / |∇L(ω_t)|², clients weighted by samples: δ² is at least this."""
        relative = ratio(self.mean.gradient_norm, self.inspection.gradient_norm)
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
            "gradient_norm": finite_or_none(self.inspection.gradient_norm),
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


@dataclass(frozen=True)
class Constants:
    """The theory's constants as far as a run has shown them: each true one is at least as large."""

    smoothness: float = 0.0
    """L_1"""
    slope: float = 0.0
    """ζ"""
    dissimilarity: float = 0.0
    """δ²"""
    stochastic_gradient_norm: float = 0.0
    """G"""
    embedding_slope: float = 0.0
    """L_2"""

    def raised(self, measured: RoundMeasurement) -> Self:
        """Return the maxima of these and of what a round has shown."""
        clients = measured.inspection.clients.values()
        of_clients = [each.name for each in fields(self) if each.name != "dissimilarity"]
        seen = {name: [getattr(client, name) for client in clients] for name in of_clients}
        seen["dissimilarity"] = [measured.dissimilarity]
        largest = {
            name: max([getattr(self, name), *(value for value in values if math.isfinite(value))])
            for name, values in seen.items()
        }
        return type(self)(**largest)

    def to_json(self) -> dict[str, float]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned."""
        return cls(**{each.name: float_of(values[each.name]) for each in fields(cls)})


@dataclass(frozen=True)
class Bounds:
    """What the theory says of one client in one round; NaN where it says nothing."""

    decrease: float
    """(η - L_1 η²/2) δ² |∇L(ω_t)|²: at least so much is training to lower L (Lemma 1)."""
    own_decrease: float
    """(η - L_1 η²/2) |∇L_i(ω_t)|²: so much one plain step lowers L_i, by the descent lemma."""
    increase: float
    """A_p weight L_2 η G |v| / τ: at most so much may the new pool raise L (Lemma 2)."""
    largest_learning_rate: float
    """The right side of Corollary 1's condition; may be negative."""

    def to_json(self) -> dict[str, float | None]:
        """Return plain values."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}


def find_bounds(measured: RoundMeasurement, client: Measurement, constants: Constants) -> Bounds:
    """Put the numbers of a client in a round into the paper's formulas."""
    rate = measured.learning_rate
    factor = rate - constants.smoothness * rate * rate / 2
    # Products, not powers: of a huge float they are infinite, where a power is an error.
    norm = measured.inspection.gradient_norm
    global_square = constants.dissimilarity * norm * norm
    # The paper adds a vector v to a scalar; its length is meant.
    reach = (
        measured.pool_factor
        * constants.embedding_slope
        * constants.stochastic_gradient_norm
        * client.embedding_length
    )
    if measured.pool_factor == 0:
        reach = 0.0
    limit = math.nan
    if constants.smoothness > 0 and global_square > 0:
        limit = 2 / constants.smoothness * (1 - reach / global_square)
    return Bounds(
        decrease=factor * global_square,
        own_decrease=factor * client.gradient_norm * client.gradient_norm,
        increase=rate * reach,
        largest_learning_rate=limit,
    )


def judge(
    measured: RoundMeasurement, client: Measurement, constants: Constants
) -> dict[str, bool | None]:
    """Tell which bounds hold, by the names of BOUNDS; None where one is not defined."""
    bounds = find_bounds(measured, client, constants)
    before, trained = client.objective_before, client.objective_after_training
    one_step, renewed = client.objective_after_one_step, client.objective_after_pool
    return {
        "lemma_1": _at_most(trained, before - bounds.decrease),
        "lemma_2": _at_most(renewed, trained + bounds.increase),
        "theorem_1": _at_most(renewed, before - bounds.decrease + bounds.increase),
        "corollary_1": _at_most(measured.learning_rate, bounds.largest_learning_rate),
        "lemma_1_one_step": _at_most(one_step, before - bounds.decrease),
        "descent_one_step": _at_most(one_step, before - bounds.own_decrease),
        "falls_in_training": _is_below(trained, before),
        "falls_over_round": _is_below(renewed, before),
        "falls_to_average": _is_below(client.objective_after_aggregation, before),
    }


def _at_most(left: float, right: float) -> bool | None:
    return left <= right if math.isfinite(left) and math.isfinite(right) else None


def _is_below(left: float, right: float) -> bool | None:
    return left < right if math.isfinite(left) and math.isfinite(right) else None
