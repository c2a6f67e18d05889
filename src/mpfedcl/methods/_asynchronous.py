"""Methods without rounds: the server folds what comes when it comes, on a virtual clock."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods._round_values import Server
from mpfedcl.methods.base import Method


class Arrival(NamedTuple):
    """What came at one moment from clients that had set out with the same version."""

    means: Tensors
    """Of what they sent, weighed by `weigh`."""
    names: Sequence[str]
    """The clients, in order of name; those of weight 0 are not among them."""
    weights: Sequence[float]
    """In the mean."""
    num_samples: int
    """Of these clients."""
    staleness: int
    """How often the server's model was changed since they were sent it; 0: never."""
    seconds: float
    """Virtual, from the sending to the arrival of the last of them."""
    share: float
    """Σ n_i of these clients / Σ n_i of all clients."""
    tier: int = 0
    """Which tier they are of, the fastest being 0, and how many there are."""
    num_tiers: int = 1


class Asynchronous(Method, ABC):
    """A method whose server waits for nobody.

    arrivals: `arrive` is called for each client's answer. tiers: clients are sorted by speed, and
    it is called when all of a tier are back. ticks: it is called every `systems.tick` seconds with
    what has come since, an `Arrival` for each version that clients had set out with.
    """

    family = "asynchronous"
    keeps = "nothing"
    timing: ClassVar[Literal["arrivals", "tiers", "ticks"]] = "arrivals"
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"systems__kind": "lognormal"})

    @property
    def num_tiers(self) -> int:
        """Into how many tiers clients are sorted, if there are so many clients."""
        return 1

    @abstractmethod
    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Fold what has come; the oldest versions first, and nothing at all in an idle tick."""

    def note_delay(self, state: Tensors, seconds: float) -> Tensors:
        """Return a client's state once it knows how long its accepted answer was under way."""
        return state


def half_squared_distance(params: Tensors, start: Tensors) -> Tensor:
    """Return |w - w_start|²/2, through which the gradient flows to w."""
    distances = [(params[name] - start[name]).square().sum() for name in params]
    return sum(distances[1:], distances[0]) / 2


def mix(old: Tensors, new: Tensors, share: float) -> Tensors:
    """Return (1 - share) old + share new."""
    mixed = {name: (1 - share) * old[name] + share * value for name, value in new.items()}
    return {**old, **mixed}


def freshness(staleness: int, power: float) -> float:
    """Return (staleness + 1)^-power: 1 for what is fresh."""
    return float((staleness + 1) ** -power)
