"""What every rule of aggregation offers to the round loop."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from safetensors.torch import load

from mpfedcl.experiment import Experiment
from mpfedcl.messages import Update
from mpfedcl.tensors import Tensors, pack_tensors


class Peers(Protocol):
    """The processes of a run that share its clients, this one included."""

    def sum(self, tensors: Tensors) -> Tensors:
        """Return the sums of the same tensors over all processes."""

    def gather(self, content: bytes) -> list[bytes]:
        """Return what each process has given, to all of them."""


class Aggregator(ABC):
    """Makes one of the tensors that clients send to be averaged, for one round.

    Args:
        template: A tensor of the right shape and type for each name that clients send.
        experiment: All settings, a rule's own among them.
    """

    def __init__(self, template: Tensors, experiment: Experiment) -> None:
        self.template = template
        self.experiment = experiment

    @abstractmethod
    def add(self, update: Update, weight: float) -> None:
        """Take in an update. They come in order of client name; a weight of 0 counts for nothing.

        What an update holds may be used by others: it must not be changed.
        """

    @abstractmethod
    def merge(self, peers: Peers) -> None:
        """Take in what the other processes of this run were given."""

    @abstractmethod
    def result(self) -> Tensors:
        """Return what the updates come to; empty where there was none."""


class RuleOverAll(Aggregator):
    """A rule that must see every update at once: it keeps them until the round is over."""

    def __init__(self, template: Tensors, experiment: Experiment) -> None:
        super().__init__(template, experiment)
        self._updates: dict[str, Tensors] = {}
        self._weights: dict[str, float] = {}

    @abstractmethod
    def combine(self, updates: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
        """Return one of all updates, which are at least one, in order of client name."""

    def add(self, update: Update, weight: float) -> None:
        """Keep the update."""
        if weight:
            averaged = update.written_out().averaged
            assert isinstance(averaged, dict)
            self._updates[update.client] = averaged
            self._weights[update.client] = weight

    def merge(self, peers: Peers) -> None:
        """Gather the updates of all processes."""
        device = next((value.device for value in self.template.values()), torch.device("cpu"))
        parts = peers.gather(_pack(self._updates, self._weights))
        self._updates, self._weights = {}, {}
        for part in parts:
            head, _, content = part.partition(b"\n")
            self._weights |= json.loads(head)
            for key, value in load(content).items():
                client, _, name = key.partition("/")
                self._updates.setdefault(client, {})[name] = value.to(device)

    def result(self) -> Tensors:
        """Return what the rule makes of all updates."""
        names = sorted(self._updates)
        if not names:
            return {}
        return self.combine([self._updates[n] for n in names], [self._weights[n] for n in names])


def _pack(updates: Mapping[str, Tensors], weights: Mapping[str, float]) -> bytes:
    # A client's name has no slash, so that the first one ends it.
    tensors = {f"{c}/{name}": value for c, each in updates.items() for name, value in each.items()}
    return json.dumps(dict(weights)).encode() + b"\n" + pack_tensors(tensors)
