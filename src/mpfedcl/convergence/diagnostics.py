"""From measurements to a round's record, and from all records to convergence.json."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from mpfedcl.convergence.bounds import BOUNDS, Constants, RoundMeasurement, find_bounds, judge
from mpfedcl.convergence.measurement import Inspection, Measurement, finite_or_none, ratio
from mpfedcl.core.files import FORMAT
from mpfedcl.experiment import Experiment

FILE = "convergence.json"
"""What `summarize_convergence` returns, in the run directory."""
NAME = "convergence"
"""The name of this diagnosis, in the settings and in the records."""

Record = Mapping[str, Any]


class ConvergenceDiagnostics:
    """Judges each round by the constants seen so far, and keeps those up to date."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._constants = Constants()

    def restore(self, record: Record) -> None:
        """Continue after a round: its record holds the constants seen so far."""
        if told := record.get("diagnostics"):
            self._constants = Constants.from_json(told[NAME]["constants"])

    def judge(
        self, round_number: int, inspection: Inspection, pool_factor: float | None
    ) -> dict[str, Any]:
        """Return what the round's record says under `diagnostics`."""
        rate = self._experiment.train.learning_rate(round_number)
        factor = math.nan if pool_factor is None else pool_factor
        measured = RoundMeasurement(rate, factor, inspection)
        self._constants = constants = self._constants.raised(measured)
        told = measured.to_json()
        for name, client in inspection.clients.items():
            told["clients"][name] |= {
                "bounds": find_bounds(measured, client, constants).to_json(),
                "holds": judge(measured, client, constants),
            }
        return {NAME: told | {"constants": constants.to_json()}}


def summarize_convergence(experiment: Experiment, records: Sequence[Record]) -> dict[str, Any]:
    """Return how often each bound held in a run and how large the constants came out.

    Drawn from the records alone; `final` puts the constants of the whole run into every round.
    """
    rounds = [RoundMeasurement.from_json(each["diagnostics"][NAME]) for each in records]
    constants = Constants()
    running: list[dict[str, bool | None]] = []
    for measured in rounds:
        constants = constants.raised(measured)
        running += [judge(measured, client, constants) for client in _clients(measured)]
    final = [judge(each, client, constants) for each in rounds for client in _clients(each)]
    on_average = [judge(each, each.mean, constants) for each in rounds if _clients(each)]
    return {
        "format": FORMAT,
        "method": experiment.method,
        "dataset": experiment.dataset.name,
        "seed": experiment.seed,
        "rounds": len(rounds),
        "client_rounds": len(final),
        "constants": constants.to_json(),
        "bounds": {
            name: {
                "running": _count(each[name] for each in running),
                "final": _count(each[name] for each in final),
                "mean_over_clients": _count(each[name] for each in on_average),
            }
            for name in BOUNDS
        },
        "sizes": _compare_sizes(rounds, constants),
        "learning_rate": _describe_limits(rounds, constants),
    }


def _clients(measured: RoundMeasurement) -> list[Measurement]:
    return list(measured.inspection.clients.values())


def _count(verdicts: Iterable[bool | None]) -> dict[str, int]:
    """Count the verdicts that there are, and those that hold."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return {"held": sum(known), "judged": len(known)}


def _compare_sizes(
    rounds: Sequence[RoundMeasurement], constants: Constants
) -> dict[str, float | None]:
    """Return means over client-rounds: what was measured beside what the theory says of it."""
    pairs = [(each, client) for each in rounds for client in _clients(each)]
    bounds = [find_bounds(each, client, constants) for each, client in pairs]
    clients = [client for _, client in pairs]
    judged = [number for number, each in enumerate(bounds) if math.isfinite(each.increase)]
    return {
        "decrease_in_training": _mean(
            c.objective_before - c.objective_after_training for c in clients
        ),
        "decrease_in_one_step": _mean(
            c.objective_before - c.objective_after_one_step for c in clients
        ),
        "decrease_claimed": _mean(each.decrease for each in bounds),
        "increase_by_pool": _mean(
            clients[n].objective_after_pool - clients[n].objective_after_training for n in judged
        ),
        "increase_allowed": _mean(bounds[n].increase for n in judged),
        "single_steps_moved": _mean(
            ratio(client.step, each.learning_rate * client.gradient_norm) for each, client in pairs
        ),
        "steps": _mean(client.num_steps for client in clients),
    }


def _describe_limits(
    rounds: Sequence[RoundMeasurement], constants: Constants
) -> dict[str, float | int | None]:
    """Return how large a learning rate Corollary 1 allows, over client-rounds."""
    found = [
        find_bounds(each, client, constants).largest_learning_rate
        for each in rounds
        for client in _clients(each)
    ]
    limits = [limit for limit in found if math.isfinite(limit)]
    return {
        "first": rounds[0].learning_rate,
        "last": rounds[-1].learning_rate,
        "limits": len(limits),
        "positive_limits": sum(limit > 0 for limit in limits),
        "smallest_limit": min(limits, default=None),
        "median_limit": median(limits) if limits else None,
        "largest_limit": max(limits, default=None),
    }


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values, None where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return finite_or_none(fmean(finite)) if finite else None
