"""Federations on digits, and all messages that an honest-but-curious server sees.

The data are the 3,000 bundled digits or, with `full` and if the data folder has them, the 70,000 of
MNIST. The server follows the protocol, and keeps every message that it receives.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mpfedcl import Experiment
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.data.loading import load_data_and_model, pixel_constants
from mpfedcl.engines import InProcessEngine
from mpfedcl.methods import Method, find_method
from mpfedcl.methods.messages import Broadcast, Total, Update
from mpfedcl.models import Model
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.secure_aggregation import TotalCollector

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Digits:
    """All digits of a set as a method's inputs: pixels, or features of a frozen encoder."""

    experiment: Experiment
    data: FederatedData
    model: Model
    inputs: Tensor
    labels: Tensor

    def replace(self, **settings: Any) -> Self:
        """Return the same digits under other settings."""
        return replace(self, experiment=self.experiment.replace(**settings))

    @property
    def method(self) -> Method:
        """The method as these settings make it."""
        return find_method(self.experiment.method)(self.experiment, self.data.num_classes)

    @property
    def pixels(self) -> Tensor:
        """Images [digits, 28, 28] in 0 to 1, where inputs are pixels."""
        mean, deviation = pixel_constants(self.experiment)
        return (self.inputs * deviation + mean).view(-1, 28, 28).clamp(0, 1)


@dataclass(frozen=True)
class SeenRound:
    """What passed between the server and its clients in a round, and what came of it."""

    broadcast: Broadcast
    updates: dict[str, Update]
    """By client; empty where secure aggregation hide them."""
    totals: list[Total]
    """What secure aggregation open."""
    released: Tensors
    """The statistics that a one-shot method keeps; under a budget they have noise."""
    following: Tensors
    """The global model after the round, which all clients receive."""


def load_digits(method: str, *, full: bool = False, **settings: Any) -> Digits:
    """Return the digits as a method sees them, always in the same order."""
    name = "mnist" if full and has_mnist() else "mnist-sample"
    given = Experiment(method=method, clients=1).replace(
        dataset__name=name,
        dataset__train_size=60_000 if name == "mnist" else 2_000,
        partition__kind="iid",
        partition__test="shared",
        **settings,
    )
    experiment = given.resolved(find_method(method).defaults)
    data, model = load_data_and_model(experiment, CPU)
    (everyone,) = data.clients
    inputs = torch.cat([everyone.inputs, data.test_inputs]).flatten(start_dim=1)
    return Digits(experiment, data, model, inputs, torch.cat([everyone.labels, data.test_labels]))


def has_mnist() -> bool:
    """Tell whether there is a data folder with MNIST."""
    return (Path(os.environ.get("MPFEDCL_DATA", "")) / "mnist").is_dir()


def observe(digits: Digits, holdings: Sequence[Tensor], **settings: Any) -> Iterator[SeenRound]:
    """Run a federation whose clients hold these digits, and yield what its server sees."""
    experiment = digits.experiment.replace(clients=len(holdings), **settings)
    nothing = torch.zeros(0, dtype=torch.int64)
    clients = tuple(
        ClientData(f"client-{number:03}", digits.inputs[rows], digits.labels[rows], nothing)
        for number, rows in enumerate(holdings)
    )
    data = replace(digits.data, clients=clients)
    assembly = assemble(
        experiment, digits.model, num_classes=data.num_classes, input_size=data.input_size
    )
    engine = _WatchingEngine(assembly, data)
    loop = _WatchingLoop(assembly, engine)
    for _ in range(experiment.rounds):
        broadcast = loop.broadcast()
        loop.run_round(evaluate=False)
        following, updates = loop.state.server.params, engine.updates
        totals: list[Total] = []
        if isinstance(loop.collector, TotalCollector) and loop.collector.total is not None:
            updates, totals = {}, [loop.collector.total]
        yield SeenRound(broadcast, updates, totals, loop.statistics, following)


class _WatchingEngine(InProcessEngine):
    """Keeps the updates of the last round."""

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        """Train, and keep each update."""
        self.updates: dict[str, Update] = {}
        for each in super().train(broadcast, names, keep=keep):
            self.updates[each.client] = each.written_out()
            yield self.updates[each.client]


class _WatchingLoop(RoundLoop):
    """Keeps the collector of the last round, with the total of secure aggregation."""

    collector: UpdateCollector

    def _make_collector(self, broadcast: Broadcast, reached: Sequence[str]) -> UpdateCollector:
        self.collector = super()._make_collector(broadcast, reached)
        return self.collector


def draw_holdings(count: int, size: int, among: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Deal `size` of `among` digits to each of `count` clients; also return the rest."""
    order = torch.randperm(among, generator=torch.Generator().manual_seed(seed))
    held = torch.split(order[: count * size], size)
    return list(held), order[count * size :]
