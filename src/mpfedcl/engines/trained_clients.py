"""Clients that have trained in a round, held together: one model, a stack, or less than that."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData
from mpfedcl.methods.messages import StackMember
from mpfedcl.models import Model
from mpfedcl.rounds.evaluation import Evaluator, Predictions


class TrainedClients(Protocol):
    """Some clients after their local training, in the order of `names`."""

    @property
    def names(self) -> Sequence[str]:
        """The clients."""

    @property
    def losses(self) -> Sequence[float]:
        """Mean training loss of each client."""

    @property
    def states(self) -> Sequence[Tensors]:
        """What each client keeps for the next round, beside parameters."""

    def averaged(self, index: int) -> Tensors | StackMember | None:
        """Return what a client sends to be averaged; None where it withholds it."""

    def params(self, index: int) -> Tensors:
        """Return a client's whole model, written out."""

    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples, in their order."""

    def predict(self, first: int, last: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...] of clients `first` to `last` on inputs."""


def distinct_groups(groups: Iterable[TrainedClients]) -> list[TrainedClients]:
    """Return each group once, in order of first appearance."""
    return list({id(group): group for group in groups}.values())


def predict_clients(
    group: TrainedClients, evaluator: Evaluator, wanted: Collection[str]
) -> Iterator[tuple[str, Predictions]]:
    """Yield what the models of the wanted clients answer; few are held at a time."""
    for first, last in find_ranges(group.names, wanted, evaluator.models_at_once):

        def apply(inputs: Tensor, first: int = first, last: int = last) -> tuple[Tensor, Tensor]:
            return group.predict(first, last, inputs)

        yield from zip(group.names[first:last], evaluator.predict(apply), strict=True)


def find_ranges(
    names: Sequence[str], wanted: Collection[str], longest: int
) -> Iterator[tuple[int, int]]:
    """Yield the places of the wanted names as ranges, none longer than `longest`."""
    first = None
    for place, name in enumerate([*names, None]):
        is_wanted = name is not None and name in wanted
        if first is not None and (not is_wanted or place - first == longest):
            yield first, place
            first = None
        if first is None and is_wanted:
            first = place


class TrainedClient:
    """One client with a model of its own."""

    def __init__(
        self,
        client: ClientData,
        model: Model,
        params: Tensors,
        *,
        averaged: Tensors | None,
        state: Tensors,
        loss: float,
    ) -> None:
        self.names = [client.name]
        self.losses = [loss]
        self.states = [state]
        self._client = client
        self._model = model
        self._params = params
        self._averaged = averaged

    def averaged(self, index: int) -> Tensors | None:
        """Return what the client sends to be averaged."""
        return self._averaged

    def params(self, index: int) -> Tensors:
        """Return the client's model."""
        return self._params

    def embed(self) -> list[Tensor]:
        """Return the embeddings of the client's training samples."""
        return [self._model.apply(self._params, self._client.inputs)[0]]

    def predict(self, first: int, last: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [1, B, ...]."""
        embeddings, logits = self._model.apply(self._params, inputs)
        return embeddings.unsqueeze(0), logits.unsqueeze(0)


class TrainedStack:
    """Several clients whose models are stacked: each parameter is one [clients, ...] tensor.

    `starts` are the parameters that travel, as each client received them; `finished` is what each
    sends where a method says so itself.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        model: Model,
        params: Tensors,
        *,
        starts: Sequence[Tensors],
        finished: Sequence[Tensors | None] | None = None,
        states: Sequence[Tensors],
        losses: Sequence[float],
    ) -> None:
        self.names = [client.name for client in clients]
        self.losses = losses
        self.states = states
        self._clients = clients
        self._model = model
        self._params = params
        self._starts = starts
        self._shared = {name: params[name] for name in starts[0]}
        self._finished = finished

    def averaged(self, index: int) -> Tensors | StackMember | None:
        """Return what a client sends: by default its part of the stack."""
        return StackMember(self, index) if self._finished is None else self._finished[index]

    def params(self, index: int) -> Tensors:
        """Return a client's model; a copy, so that it does not hold the whole stack in memory."""
        return {name: value[index].clone() for name, value in self._params.items()}

    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples."""
        models = ({n: v[i] for n, v in self._params.items()} for i in range(len(self)))
        # One by one: batched products of such sizes are slower, and sizes differ.
        return [
            self._model.apply(params, client.inputs)[0]
            for params, client in zip(models, self._clients, strict=True)
        ]

    def predict(self, first: int, last: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...]."""
        some = {name: value[first:last] for name, value in self._params.items()}
        return self._model.apply_many(some, inputs)

    # As `messages.UpdateStack`

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def template(self) -> Tensors:
        """One client's tensors, for their shapes."""
        return {name: value[0] for name, value in self._shared.items()}

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return the weighted sum over clients."""
        # A client that does not count may hold NaN, which no weight of 0 takes away.
        counted = weights.nonzero().squeeze(1)
        everyone = len(counted) == len(weights)
        return {
            name: torch.tensordot(
                weights[counted].to(value), value if everyone else value[counted], dims=1
            )
            for name, value in self._shared.items()
        }

    @cached_property
    def squared_changes(self) -> list[float]:
        """The squared distance of each client's shared parameters from where they started."""
        squares = torch.zeros(len(self), dtype=torch.float64)
        for name, value in self._shared.items():
            # One by one: the differences of all clients at once would take their memory again.
            pairs = zip(value, self._starts, strict=True)
            changes = (each - start[name] for each, start in pairs)
            squares += torch.stack(
                [c.square().sum(-1).sum(dtype=torch.float64).cpu() for c in changes]
            )
        return squares.tolist()

    def tensors(self, index: int) -> Tensors:
        """Return what one client shares."""
        return {name: value[index] for name, value in self._shared.items()}
