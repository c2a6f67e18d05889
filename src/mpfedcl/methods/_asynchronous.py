"""Methods without rounds: the server changes its model whenever updates arrive."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import AsoFedSettings, FedAsyncSettings, FedATSettings
from mpfedcl.methods.base import Batch, Context, Family, Method, Server


class Arrival(NamedTuple):
    """Updates that arrived at the same time from clients that were sent the same model version."""

    means: Tensors
    """The means of the clients' tensors, weighted by `weigh`."""
    names: Sequence[str]
    """The clients of positive weight, in order of name."""
    weights: Sequence[float]
    """Their weights in the mean."""
    num_samples: int
    """Training samples of these clients."""
    staleness: int
    """The number of changes of the global model since it was sent to these clients."""
    seconds: float
    """Time from the dispatch to the last arrival, on the virtual clock."""
    share: float
    """Σ n_i of these clients / Σ n_i of all clients."""
    tier: int = 0
    """The clients' tier; 0 is the fastest."""
    num_tiers: int = 1


class Asynchronous(Method, ABC):
    """A method whose server does not wait for a round to end: `arrive` takes the place of `reduce`.

    `timing` defines when `arrive` is called. arrivals: for each update. tiers: clients are sorted
    by speed, and `arrive` is called when all clients of a tier have replied. ticks: every
    `systems.tick` seconds, with one `Arrival` for each model version among the updates.
    """

    family: ClassVar[Family] = "asynchronous"
    timing: ClassVar[Literal["arrivals", "tiers", "ticks"]] = "arrivals"
    defaults: ClassVar[Mapping[str, Any]] = {"systems__kind": "lognormal"}

    @property
    def num_tiers(self) -> int:
        """The number of tiers of clients; fewer clients give fewer tiers."""
        return 1

    @abstractmethod
    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Return the server's next state; oldest versions come first, an idle tick has none."""

    def note_delay(self, state: Tensors, seconds: float) -> Tensors:
        """Return a client's state after an accepted update that took `seconds`."""
        return state


class AsynchronousProximal(Asynchronous, ABC):
    """An asynchronous method whose clients minimize f_i(w) + pull/2 |w - w_sent|^2."""

    settings: AsoFedSettings | FedAsyncSettings | FedATSettings

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + pull/2 |w - w_sent|^2."""
        distances = [(params[name] - context.start[name]).square().sum() for name in params]
        proximity = self.settings.pull / 2 * sum(distances[1:], distances[0])
        return super().loss(params, batch, context) + proximity


def mix(old: Tensors, new: Tensors, share: float) -> Tensors:
    """Return (1 - share) old + share new."""
    mixed = {name: (1 - share) * old[name] + share * value for name, value in new.items()}
    return {**old, **mixed}


def freshness(staleness: int, power: float) -> float:
    """Return (staleness + 1)^-power: 1 for a fresh update."""
    return float((staleness + 1) ** -power)
