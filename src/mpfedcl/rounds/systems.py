"""System heterogeneity: how long clients take, in virtual seconds, and stragglers.

Time is never measured: it follows from settings, random keys and sizes, so that arrivals have the
same order on every machine. The server and evaluation take no time.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isabstract
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NoReturn, Self

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import SystemsSettings
from mpfedcl.methods import Asynchronous, Method, PartialModel, SharesPrototypes
from mpfedcl.methods.messages import Broadcast

if TYPE_CHECKING:
    from mpfedcl.rounds.assembly import Assembly

_TIER_DELAYS = ((0.0, 0.0), (0.0, 5.0), (6.0, 10.0), (11.0, 15.0), (20.0, 30.0))
"""Delays in seconds, from the fastest fifth of the clients to the slowest (Chai et al., 2021)."""
_SPEEDS = 4
"""Speeds of a client: training, download, upload and latency."""


class SystemModel:
    """The clients' speeds.

    `label_counts` are training samples of each class by client; `passes` returns how often each of
    them is used in a round, given their number.
    """

    def __init__(
        self,
        settings: SystemsSettings,
        seed: int,
        label_counts: Mapping[str, Sequence[int]],
        passes: Callable[[int], float],
    ) -> None:
        self._settings, self._seed = settings, seed
        self._sizes = {name: sum(counts) for name, counts in label_counts.items()}
        self._rows = {name: size * passes(size) for name, size in self._sizes.items()}
        order = self._from_fast_to_slow(label_counts)
        self._slowness = self._draw_slowness(order)
        delays = _TIER_DELAYS if settings.kind == "tiers" else _TIER_DELAYS[:1]
        self._delays = {n: delays[i * len(delays) // len(order)] for i, n in enumerate(order)}

    @classmethod
    def of(cls, assembly: "Assembly", label_counts: Mapping[str, Sequence[int]]) -> Self | None:
        """Return the speeds that an experiment asks for; None without a virtual clock."""
        experiment = assembly.experiment
        if not experiment.systems.has_clock:
            return None
        training, size = assembly.method.local_training(1), experiment.train.batch_size
        passes = partial(training.passes, batch_size=size)
        return cls(experiment.systems, experiment.seed, label_counts, passes)

    def seconds(self, client: str, dispatch: int, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds from sending a model to a client to the arrival of its answer."""
        jitter, delay = 1.0, self._delays[client]
        if self._settings.jitter:
            draw = numpy_generator(self._seed, client, dispatch, "jitter")
            jitter = float(numpy.exp(self._settings.jitter * draw.standard_normal()))
        wait = float(numpy_generator(self._seed, client, dispatch, "delay").uniform(*delay))
        return wait + self._without_delay(client, jitter, bytes_down, bytes_up)

    def expected(self, client: str, bytes_down: int, bytes_up: int) -> float:
        """Return the typical seconds of a client."""
        return sum(self._delays[client]) / 2 + self._without_delay(client, 1, bytes_down, bytes_up)

    def gives_up_after(self, client: str, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds after which a lost answer is given up."""
        return self._settings.patience * self.expected(client, bytes_down, bytes_up)

    def typical(self, bytes_down: int, bytes_up: int) -> float:
        """Return the median over clients of their typical seconds."""
        return median(self.expected(name, bytes_down, bytes_up) for name in self._sizes)

    def loses(self, client: str, dispatch: int) -> bool:
        """Return whether a client's answer is lost."""
        share = self._settings.drop
        return share > 0 and numpy_generator(self._seed, client, dispatch, "drop").random() < share

    def in_tiers(self, names: Sequence[str], number: int, bytes_up: int) -> list[list[str]]:
        """Sort clients into tiers by their typical seconds, the fastest first.

        Tiers are equally large, up to one client; ties go by name.
        """
        # The download is as large as the upload.
        ordered = sorted(names, key=lambda name: (self.expected(name, bytes_up, bytes_up), name))
        return sort_into_tiers(ordered, number)

    def _without_delay(self, client: str, jitter: float, bytes_down: int, bytes_up: int) -> float:
        settings, slow = self._settings, self._slowness[client]
        training = self._rows[client] * settings.seconds_a_sample
        return (
            slow[0] * training * jitter
            + slow[1] * bytes_down / settings.down
            + slow[2] * bytes_up / settings.up
            + slow[3] * 2 * settings.latency
        )

    def _from_fast_to_slow(self, label_counts: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the clients from fast to slow, by their data if `follows` asks for it."""
        names = sorted(label_counts)
        if self._settings.follows == "size":
            return sorted(names, key=lambda name: self._sizes[name])
        if self._settings.follows == "label":

            def mean_class(name: str) -> float:
                total = sum(place * count for place, count in enumerate(label_counts[name]))
                return total / max(1, self._sizes[name])

            return sorted(names, key=mean_class)
        return [names[i] for i in numpy_generator(self._seed, "pace").permutation(len(names))]

    def _draw_slowness(self, order: Sequence[str]) -> dict[str, list[float]]:
        """Return the factor by which each speed of a client is below the median."""
        spread = self._settings.spread if self._settings.kind == "lognormal" else 0.0
        drawn = numpy.array(
            [numpy_generator(self._seed, name, "pace").standard_normal(_SPEEDS) for name in order]
        )
        if self._settings.follows != "none":
            # The same draws, sorted: the slowest go to the last clients of the order.
            drawn = drawn[numpy.argsort(drawn.sum(axis=1), kind="stable")]
        return dict(zip(order, numpy.exp(spread * drawn).tolist(), strict=True))


def sort_into_tiers(ordered: Sequence[str], number: int) -> list[list[str]]:
    """Split clients ordered by speed into equal tiers, at most one per client."""
    number = min(number, len(ordered))
    ends = [len(ordered) * place // number for place in range(number + 1)]
    return [sorted(ordered[a:b]) for a, b in pairwise(ends)]


class WaitingRound:
    """A round that ends once enough of its clients have answered, a share of those chosen.

    Stragglers and clients with lost answers are missing. If too few answers are left, the round
    waits until all the others are given up. `bytes_up` is the expected size of a full update.
    """

    def __init__(
        self,
        systems: SystemModel,
        broadcast: Broadcast,
        chosen: Sequence[str],
        *,
        enough: float,
        bytes_up: int,
    ) -> None:
        self._systems, self._number, self._chosen = systems, broadcast.round, chosen
        self._down = {name: broadcast.num_bytes_to([name]) for name in chosen}
        reached = [name for name in chosen if not systems.loses(name, self._number)]
        needed = max(1, round(enough * len(chosen)))
        self._is_enough = len(reached) >= needed
        # A part of the model returns with the size that was sent.
        parts = {name: self._down[name] for name in broadcast.units}
        expected = {name: self._seconds(name, parts.get(name, bytes_up)) for name in reached}
        first = sorted(reached, key=lambda name: (expected[name], name))[:needed]
        self.in_time = sorted(first) if self._is_enough else reached
        """The clients whose answers count."""

    def seconds(self, uploads: Mapping[str, int], otherwise: int) -> float:
        """Return the seconds of the round, given the uploaded bytes by client."""
        awaited = self.in_time if self._is_enough else self._chosen
        return max(
            (self._seconds(name, uploads.get(name, otherwise)) for name in awaited), default=0.0
        )

    def _seconds(self, name: str, bytes_up: int) -> float:
        """Return the seconds until a client has answered, or is given up."""
        if self._systems.loses(name, self._number):
            return self._systems.gives_up_after(name, self._down[name], bytes_up)
        return self._systems.seconds(name, self._number, self._down[name], bytes_up)


def check_timing(method: type[Method], experiment: Experiment) -> None:
    """Reject settings that do not fit an asynchronous method or lost answers."""
    if experiment.systems.drop and experiment.secure_aggregation:
        raise InvalidInput(
            f"systems.drop is {experiment.systems.drop:g}; with secure_aggregation it must be 0: "
            "clients that vanish from a sum are not simulated."
        )
    is_partial = experiment.systems.has_clock and experiment.network.enough < 1
    if is_partial and experiment.secure_aggregation:
        raise InvalidInput(
            f"network.enough is {experiment.network.enough:g}; with secure_aggregation on a "
            "virtual clock it must be 1: clients that vanish from a sum are not simulated."
        )
    if not issubclass(method, Asynchronous):
        return
    if issubclass(method, SharesPrototypes) or not method.trains:
        raise InvalidInput(
            f"method is {experiment.method!r}, which is asynchronous; it must be an "
            "mpfedcl.methods.Asynchronous that trains and shares no prototypes."
        )
    if isabstract(method):
        raise InvalidInput(
            f"method is {experiment.method!r}, which does not say what the server does with an "
            "answer; it must have the method arrive(server, arrivals)."
        )
    if issubclass(method, PartialModel):
        raise InvalidInput(
            f"method is {experiment.method!r}, which sends parts of a model and is asynchronous; "
            "it must be one or the other."
        )

    def refuse(setting: str, allowed: str) -> NoReturn:
        required = f"with {experiment.method}, which is asynchronous, it must be"
        raise InvalidInput(f"{setting}; {required} {allowed}.")

    if experiment.asked_workers > 1:
        refuse(f"workers is {experiment.workers}", "1: clients answer one after the other")
    if experiment.secure_aggregation:
        refuse("secure_aggregation is on", "off: no round has clients that could be summed")
    if experiment.privacy.epsilon is not None:
        counts = "left out: the budget counts rounds, and here clients answer as often as they can"
        refuse(f"privacy.epsilon is {experiment.privacy.epsilon:g}", counts)
    if experiment.aggregation.rule != "mean":
        rule = f"aggregation.rule is {experiment.aggregation.rule!r}"
        refuse(rule, "mean: other rules compare the clients of a round")
    if experiment.validation.bounds == "on":
        refuse("validation.bounds is 'on'", "auto or off: bounds compare the clients of a round")


def check_clock(method: type[Method], experiment: Experiment) -> None:
    """Reject the simulation of an asynchronous method without a virtual clock."""
    if issubclass(method, Asynchronous) and not experiment.systems.has_clock:
        raise InvalidInput(
            f"systems.kind is {experiment.systems.kind or 'none'!r}; with {experiment.method}, "
            "which is asynchronous, it must be lognormal or tiers. Clients are equally fast with "
            "lognormal and systems.spread 0."
        )


def refuse_over_network(method: type[Method], experiment: Experiment) -> None:
    """Reject settings that only a simulation has: its clock and public images."""
    if experiment.systems.has_clock:
        raise InvalidInput(
            f"systems.kind is {experiment.systems.kind!r}; over a network it must be none or left "
            "out: time is real there."
        )
    if experiment.public.size and "public__size" not in method.defaults:
        raise InvalidInput(
            f"public.size is {experiment.public.size}; over a network it must be 0 or left out: "
            f"with {experiment.method} the server has no images there."
        )
