"""How long clients take, in virtual seconds.

Time is never measured: it follows from settings, keys and sizes, so that who comes first is the
same on every machine. The server, and evaluation, take no time.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Self

import numpy

from mpfedcl.core.rng import numpy_generator
from mpfedcl.experiment.settings import SystemsSettings
from mpfedcl.rounds.assembly import Assembly

_TIER_DELAYS = ((0.0, 0.0), (0.0, 5.0), (6.0, 10.0), (11.0, 15.0), (20.0, 30.0))
"""Seconds that clients wait, from the fastest fifth of them to the slowest (Chai et al., 2021)."""
_SPEEDS = 4
"""Of training, downloads, uploads and single messages."""


class SystemModel:
    """The clients' speeds.

    Args:
        settings: What they are drawn from.
        seed: The run's.
        label_counts: Training samples of each class, by client.
        passes: How often a client trains on each of its samples when it is asked once.
    """

    def __init__(
        self,
        settings: SystemsSettings,
        seed: int,
        label_counts: Mapping[str, Sequence[int]],
        passes: int,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._passes = passes
        self._sizes = {name: sum(counts) for name, counts in label_counts.items()}
        order = self._from_fast_to_slow(label_counts)
        self._slowness = self._draw_slowness(order)
        self._delays = {
            name: _TIER_DELAYS[place * len(_TIER_DELAYS) // len(order)]
            if settings.kind == "tiers"
            else (0.0, 0.0)
            for place, name in enumerate(order)
        }

    @classmethod
    def of(cls, assembly: Assembly, label_counts: Mapping[str, Sequence[int]]) -> Self | None:
        """Return the pace that an experiment asks for; None where it has no clock."""
        experiment = assembly.experiment
        if not experiment.systems.has_clock:
            return None
        passes = assembly.method.local_training(1).passes
        return cls(experiment.systems, experiment.seed, label_counts, passes)

    def seconds(self, client: str, dispatch: int, bytes_down: int, bytes_up: int) -> float:
        """Return how long a client takes from being sent a model to the arrival of its answer."""
        jitter, delay = 1.0, self._delays[client]
        if self._settings.jitter:
            draw = numpy_generator(self._seed, client, dispatch, "jitter")
            jitter = float(numpy.exp(self._settings.jitter * draw.standard_normal()))
        wait = float(numpy_generator(self._seed, client, dispatch, "delay").uniform(*delay))
        return wait + self._without_delay(client, jitter, bytes_down, bytes_up)

    def expected(self, client: str, bytes_down: int, bytes_up: int) -> float:
        """Return how long it mostly takes."""
        return sum(self._delays[client]) / 2 + self._without_delay(client, 1, bytes_down, bytes_up)

    def gives_up_after(self, client: str, bytes_down: int, bytes_up: int) -> float:
        """Return after how many seconds nobody waits for a lost answer any more."""
        return self._settings.patience * self.expected(client, bytes_down, bytes_up)

    def typical(self, bytes_down: int, bytes_up: int) -> float:
        """Return what half of the clients mostly need."""
        return median(self.expected(name, bytes_down, bytes_up) for name in self._sizes)

    def loses(self, client: str, dispatch: int) -> bool:
        """Tell whether a client's answer is lost on its way."""
        if not self._settings.drop:
            return False
        draw = numpy_generator(self._seed, client, dispatch, "drop")
        return bool(draw.random() < self._settings.drop)

    def in_tiers(self, names: Sequence[str], number: int, bytes_up: int) -> list[list[str]]:
        """Sort clients into so many tiers by the seconds they mostly take, the fastest first.

        Tiers are equally large, up to one client; ties go by name.
        """
        # What is sent down is as much as comes up.
        ordered = sorted(names, key=lambda name: (self.expected(name, bytes_up, bytes_up), name))
        return sort_into_tiers(ordered, number)

    def _without_delay(self, client: str, jitter: float, bytes_down: int, bytes_up: int) -> float:
        settings, slow = self._settings, self._slowness[client]
        training = self._sizes[client] * self._passes * settings.seconds_a_sample
        return (
            slow[0] * training * jitter
            + slow[1] * bytes_down / settings.down
            + slow[2] * bytes_up / settings.up
            + slow[3] * 2 * settings.latency
        )

    def _from_fast_to_slow(self, label_counts: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the clients in an order in which speeds may follow what they hold."""
        if self._settings.follows == "size":
            return sorted(label_counts, key=lambda name: (self._sizes[name], name))
        if self._settings.follows == "label":

            def mean_class(name: str) -> float:
                counts = label_counts[name]
                return sum(place * count for place, count in enumerate(counts)) / max(
                    1, sum(counts)
                )

            return sorted(label_counts, key=lambda name: (mean_class(name), name))
        drawn = numpy_generator(self._seed, "pace").permutation(len(label_counts))
        names = sorted(label_counts)
        return [names[place] for place in drawn]

    def _draw_slowness(self, order: Sequence[str]) -> dict[str, list[float]]:
        """Return by how much each of a client's speeds is below the median's."""
        spread = self._settings.spread if self._settings.kind == "lognormal" else 0.0
        drawn = numpy.array(
            [numpy_generator(self._seed, name, "pace").standard_normal(_SPEEDS) for name in order]
        )
        if self._settings.follows != "none":
            # The same speeds in all; those that are slowest altogether go to whoever is last.
            drawn = drawn[numpy.argsort(drawn.sum(axis=1), kind="stable")]
        return dict(zip(order, numpy.exp(spread * drawn).tolist(), strict=True))


def sort_into_tiers(ordered: Sequence[str], number: int) -> list[list[str]]:
    """Cut clients that are ordered by speed into so many tiers, or as many as there are clients."""
    number = min(number, len(ordered))
    ends = [len(ordered) * place // number for place in range(number + 1)]
    return [sorted(ordered[a:b]) for a, b in pairwise(ends)]
