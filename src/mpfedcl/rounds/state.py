"""The server's state between two rounds, and the clients under way of an asynchronous run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

from pydantic import Field

from mpfedcl.core.json_files import FileContent
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Server
from mpfedcl.prototypes import Prototypes

_Count = Annotated[int, Field(ge=0, le=10**15)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Dispatch(FileContent):
    """One client that was sent the model and has not answered yet."""

    client: str
    number: _Count
    """Of the dispatch: clients that are sent the model together share it."""
    version: _Count
    """Version of the model that the client was sent."""
    round: Annotated[int, Field(ge=1, le=10**9)]
    """The round at dispatch, which sets the learning rate."""
    sent: _Seconds
    due: _Seconds
    """When the answer arrives, or is given up."""
    tier: _Count = 0
    is_lost: bool = False

    @property
    def seconds(self) -> float:
        """From sending to arrival."""
        return self.due - self.sent


class ArrivalCounts(FileContent):
    """The progress of an asynchronous run and its clients under way, as plain values."""

    version: _Count = 0
    """Number of changes of the server's model."""
    sendings: _Count = 0
    answers: _Count = 0
    ticks: _Count = 0
    elapsed_seconds: _Seconds = 0.0
    """Over a network: wall-clock seconds while the server was running."""
    tiers: list[list[str]] = Field(default_factory=list)
    """Over a network: the clients by measured speed, the fastest tier first."""
    under_way: list[Dispatch] = Field(default_factory=list)


@dataclass(frozen=True)
class SentModel:
    """A version of the server's model that a client under way was sent."""

    params: Tensors
    extra: Tensors


@dataclass(frozen=True)
class ArrivalState:
    """The part of the state that only asynchronous runs have."""

    counts: ArrivalCounts = field(default_factory=ArrivalCounts)
    models: Mapping[int, SentModel] = field(default_factory=dict)
    """By version, as far as a client under way was sent it."""

    def without(self, returned: Sequence[Dispatch]) -> Self:
        """Return the state without these dispatches."""
        back = {each.client for each in returned}
        left = [each for each in self.counts.under_way if each.client not in back]
        needed = {each.version for each in left}
        return replace(
            self,
            counts=self.counts.model_copy(update={"under_way": left}),
            models={version: each for version, each in self.models.items() if version in needed},
        )

    def tensors(self) -> Tensors:
        """Return the models as named tensors, for a checkpoint."""
        return {
            f"{version}/{part}/{name}": value
            for version, each in self.models.items()
            for part in ("params", "extra")
            for name, value in getattr(each, part).items()
        }

    @classmethod
    def read(cls, counts: ArrivalCounts, tensors: Tensors) -> Self:
        """Read a checkpoint; raises KeyError if a client's model is missing."""
        found: dict[int, SentModel] = {}
        for key, value in tensors.items():
            version, part, name = key.split("/", 2)
            model = found.setdefault(int(version), SentModel({}, {}))
            vars(model)[part][name] = value
        return cls(counts, {each.version: found[each.version] for each in counts.under_way})


@dataclass(frozen=True)
class RoundState:
    """The server's state that the next round depends on."""

    round: int
    server: Server
    prototypes: dict[str, tuple[int, Prototypes]]
    """The latest prototypes of each client and the round they came in."""
    median_norm: float | None = None
    """Of the clients' changes in the last round with any, if updates are bounded."""
    reputations: Mapping[str, float] = field(default_factory=dict)
    """The reputation of each client, if updates are bounded."""
    virtual_seconds: float = 0.0
    """The time of the virtual clock, if there is one."""
    arrivals: ArrivalState | None = None
    """The clients under way of an asynchronous method."""
