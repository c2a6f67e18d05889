"""Who is under way in an asynchronous run, with what, and when they will be back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import torch
from pydantic import Field

from mpfedcl.core.json_files import FileContent
from mpfedcl.core.tensors import Tensors

_Count = Annotated[int, Field(ge=0, le=10**15)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Dispatch(FileContent):
    """One client that was sent the model and has not answered yet."""

    client: str
    number: _Count
    """Of the sending: clients that are sent out at one moment have the same."""
    version: _Count
    """Of the model that it was sent."""
    round: Annotated[int, Field(ge=1, le=10**9)]
    """The record that was under way: learning rates go by it."""
    sent: _Seconds
    due: _Seconds
    """When its answer arrives, or is given up at the latest."""
    tier: _Count = 0
    is_lost: bool = False

    @property
    def seconds(self) -> float:
        """From sending to arrival."""
        return self.due - self.sent


class ArrivalCounts(FileContent):
    """How far an asynchronous run has come, and who is under way: plain values."""

    version: _Count = 0
    """Of the server's model: how often it was changed."""
    sendings: _Count = 0
    answers: _Count = 0
    ticks: _Count = 0
    elapsed_seconds: _Seconds = 0.0
    """Over a network: real ones, without those in which the server was not running."""
    tick: _Seconds | None = None
    """Over a network, where no setting says it: seconds from one tick to the next, as measured."""
    tiers: list[list[str]] = Field(default_factory=list)
    """Over a network: the clients by their measured speed, the fastest tier first."""
    under_way: list[Dispatch] = Field(default_factory=list)


@dataclass(frozen=True)
class SentModel:
    """What a version of the server's model was, for those who are under way with it."""

    params: Tensors
    extra: Tensors


@dataclass(frozen=True)
class ArrivalState:
    """All that the next arrival depends on, beside what every run has."""

    counts: ArrivalCounts = field(default_factory=ArrivalCounts)
    models: Mapping[int, SentModel] = field(default_factory=dict)
    """By version; only of versions that somebody is under way with."""

    def without(self, returned: Sequence[Dispatch]) -> Self:
        """Return the state once some are no longer under way."""
        back = {each.client for each in returned}
        left = [each for each in self.counts.under_way if each.client not in back]
        needed = {each.version for each in left}
        return replace(
            self,
            counts=self.counts.model_copy(update={"under_way": left}),
            models={version: each for version, each in self.models.items() if version in needed},
        )

    def to(self, device: torch.device) -> Self:
        """Return the state on a device."""
        models = {
            version: SentModel(
                *({n: v.to(device) for n, v in part.items()} for part in (each.params, each.extra))
            )
            for version, each in self.models.items()
        }
        return replace(self, models=models)

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
        """Return what a checkpoint holds; a KeyError where somebody's model is missing."""
        found: dict[int, SentModel] = {}
        for key, value in tensors.items():
            version, part, name = key.split("/", 2)
            model = found.setdefault(int(version), SentModel({}, {}))
            {"params": model.params, "extra": model.extra}[part][name] = value
        return cls(counts, {each.version: found[each.version] for each in counts.under_way})
