"""The interface of aggregation rules.

`RULES` of this package and `AGGREGATION_RULES` of `experiment/names.py` list them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from safetensors.torch import load

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import AggregationSettings
from mpfedcl.methods.messages import Update


class Peers(Protocol):
    """The processes of a run, including this one."""

    def sum(self, tensors: Tensors) -> Tensors:
        """Return the sums of the same tensors over all processes."""

    def gather(self, content: bytes) -> list[bytes]:
        """Return the content of each process, to all of them."""

    def gather_to_leader(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of all processes to the leading one, and nothing to the others."""

    def broadcast(self, content: bytes) -> bytes:
        """Return the leading process's content, to all of them."""


class Aggregator(ABC):
    """Aggregates the parameters that clients send in one round.

    `template` has a tensor with the shape and type of each parameter.
    """

    def __init__(self, template: Tensors, experiment: Experiment) -> None:
        self.template = template
        self.experiment = experiment

    @classmethod  # noqa: B027  -- most rules take any number
    def check(cls, experiment: Experiment, num_clients: int) -> None:
        """Reject an experiment whose rounds have too few clients for the rule."""

    @abstractmethod
    def add(self, update: Update, weight: float) -> None:
        """Add an update, in order of client name; a weight of 0 does not count.

        The tensors of an update may be shared and must not be changed.
        """

    @abstractmethod
    def merge(self, peers: Peers) -> None:
        """Combine with the other processes of this run."""

    @abstractmethod
    def result(self) -> Tensors:
        """Return the aggregate; empty without updates."""

    def remarks(self) -> list[str]:
        """Return remarks for the round's record."""
        return []


class RuleOverAll(Aggregator):
    """A rule over all updates at once: it keeps them until the round is over.

    All clients count alike, because weights are claims of the clients.
    """

    def __init__(self, template: Tensors, experiment: Experiment) -> None:
        super().__init__(template, experiment)
        self._updates: dict[str, Tensors] = {}
        self._remarks: list[str] = []

    @classmethod
    def most_attackers(cls, count: int) -> int:
        """Return how many of `count` updates may be malicious; below 0 the rule is undefined."""
        return (count - 1) // 2

    @abstractmethod
    def combine(self, updates: Sequence[Tensors], attackers: int) -> Tensors:
        """Return the combination of one or more updates, independent of their order.

        `attackers` of them may be malicious; the rule tolerates that many.
        """

    @classmethod
    def check(cls, experiment: Experiment, num_clients: int) -> None:
        """Reject more attackers than the rule tolerates."""
        settings = experiment.aggregation
        wanted, most = _attackers(settings, num_clients), max(0, cls.most_attackers(num_clients))
        if wanted > most:
            raise InvalidInput(
                f"aggregation.attackers is {settings.attackers:g}, {wanted} of a round's "
                f"{num_clients} clients; it must be at most {most / num_clients:.3g}, because "
                f"among that many aggregation.rule {settings.rule} withstands {most}."
            )

    def add(self, update: Update, weight: float) -> None:
        """Keep the update."""
        if weight:
            averaged = update.written_out().averaged
            assert isinstance(averaged, dict)
            self._updates[update.client] = averaged

    def merge(self, peers: Peers) -> None:
        """Gather the updates of all processes."""
        device = next((value.device for value in self.template.values()), torch.device("cpu"))
        parts = peers.gather(_pack(self._updates))
        self._updates = {}
        for part in parts:
            for key, value in load(part).items():
                client, _, name = key.partition("/")
                self._updates.setdefault(client, {})[name] = value.to(device)

    def result(self) -> Tensors:
        """Return the combination of all updates."""
        if not self._updates:
            return {}
        updates = [update for _, update in sorted(self._updates.items())]
        wanted = max(1, _attackers(self.experiment.aggregation, len(updates)))
        most = self.most_attackers(len(updates))
        name, found = self.experiment.aggregation.rule, f"{len(updates)} updates"
        remark = f"Among {found} the rule {name} withstands {max(0, most)} hostile ones."
        self._remarks = [remark] if most < wanted else []
        if most < 0:
            return {n: torch.stack([each[n] for each in updates]).mean(0) for n in updates[0]}
        return self.combine(updates, min(most, wanted))

    def remarks(self) -> list[str]:
        """Return a remark if the rule tolerates fewer attackers than expected."""
        return self._remarks


def _attackers(settings: AggregationSettings, num_clients: int) -> int:
    # 0.3 of 10 clients are 3, despite rounding of the product.
    return int(settings.attackers * num_clients + 1e-9)


def _pack(updates: Mapping[str, Tensors]) -> bytes:
    # Client names have no slash, so the first one ends the name.
    return pack_tensors(
        {f"{c}/{name}": value for c, each in updates.items() for name, value in each.items()}
    )
