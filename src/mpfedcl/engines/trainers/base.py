"""The interface of trainers: clients before local training, their batches, trained clients."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trainers.augmentation import Augmentation
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, FullBatch, LocalTraining, Method
from mpfedcl.methods.messages import StackMember
from mpfedcl.models import Model
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.scoring import Evaluator, Predictions, as_stack


def draw_batches(
    client: ClientData,
    experiment: Experiment,
    round_number: int,
    training: LocalTraining | None = None,
    least: int = 1,
) -> list[Tensor]:
    """Return the samples of each step: a new order in each epoch, whose last batch is shorter.

    Without `training`, each batch that the experiment asks for serves one step. If the last batch
    has fewer than `least` samples, the last two batches share theirs evenly.
    """
    training = training or LocalTraining.of(experiment.train, round_number)
    size = min(len(client.labels), experiment.train.batch_size)
    sizes = [len(batch) for batch in torch.split(torch.arange(len(client.labels)), size)]
    if sizes[-1] < least and len(sizes) > 1:
        both = sum(sizes[-2:])
        sizes[-2:] = both - both // 2, both // 2
    per_epoch = len(sizes)
    count = training.epochs * per_epoch + training.batches
    batches: list[Tensor] = []
    for epoch in range(-(-count // per_epoch)):
        key = generator(experiment.seed, round_number, client.name, "batches", epoch)
        order = torch.randperm(len(client.labels), generator=key).to(client.labels.device)
        batches += torch.split(order, sizes)
    return [batch for batch in batches[:count] for _ in range(training.repeats)]


@dataclass(frozen=True)
class ClientTask:
    """One client's task for a round."""

    client: ClientData
    start: Tensors
    """All initial parameters: those received and the local ones."""
    state: Tensors
    """The state from the client's last round."""
    own: Tensors
    """The result of the method's `describe` on the client's labels."""
    number: int
    """Of the round, or of the dispatch if there are no rounds: the key that draws batches."""
    is_part: bool = False
    """Whether the client has a part of the model only, with zeros for the rest."""
    weights: Tensor | None = None
    """[samples], of their classes; None for equal weights."""
    augmentation: Augmentation | None = None

    def batch(self, chosen: Tensor, step: int) -> FullBatch:
        """Return the samples of a step."""
        inputs = self.augment(self.client.inputs.index_select(0, chosen), step)
        weights = None if self.weights is None else self.weights.index_select(0, chosen)
        return FullBatch.of(inputs, self.client.labels.index_select(0, chosen), weights)

    def augment(self, inputs: Tensor, step: int) -> Tensor:
        """Return the inputs of a step, augmented if the experiment asks for it."""
        if self.augmentation is None:
            return inputs
        return self.augmentation(inputs, self.number, self.client.name, step)


def weigh_classes(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return n / (C n_c) for each label c, where C counts the classes that occur."""
    counts = torch.bincount(labels)
    return (len(labels) / ((counts > 0).sum() * counts).to(dtype))[labels]


@dataclass(frozen=True)
class Schedule:
    """The steps of several clients together, clients with most steps first."""

    tasks: Sequence[ClientTask]
    samples: Tensor
    """[clients, steps, rows] int64 indices into each client's samples; 0 for padding."""
    mask: Tensor
    """[clients, steps, rows], False for padding."""
    num_steps: Sequence[int]
    """Steps of each client, never increasing: clients that still train are the first ones."""
    pads: bool = True
    """Whether the loss leaves padding rows out; otherwise it sees none."""

    @property
    def clients(self) -> list[ClientData]:
        """The clients of the tasks."""
        return [task.client for task in self.tasks]

    @property
    def num_rows(self) -> int:
        """Rows of a step: the largest batch."""
        return self.samples.shape[2]

    def active(self, step: int) -> int:
        """Return the number of clients that still train in a step."""
        return sum(step < each for each in self.num_steps)

    def whole(self) -> Batch:
        """Return the samples of all steps [clients, steps * rows, ...]."""
        pairs = list(zip(self.tasks, self.samples.flatten(1), strict=True))
        drawn = [task.weights[due] for task, due in pairs if task.weights is not None]
        weights = torch.stack(drawn) if drawn else None
        return Batch(self.inputs(), self.labels(), self.mask.flatten(1), weights)

    def batches(self, whole: Batch, step: int) -> Iterator[tuple[slice | Tensor, Batch]]:
        """Yield the clients that train together in a step, and their part of all samples.

        Without padding, only clients whose batches are of equal size train together.
        """
        some: slice | Tensor = slice(self.active(step))
        sizes = self.mask[some, step].sum(1)
        groups = [self.num_rows] if self.pads else sorted(set(sizes.tolist()))
        begin = step * self.num_rows
        for size in groups:
            if len(groups) > 1:
                some = (sizes == size).nonzero().squeeze(1)
            rows = slice(begin, begin + size)
            yield some, Batch(*(part[some, rows] for part in whole if part is not None))

    def inputs(self) -> Tensor:
        """Return [clients, steps * rows, ...]: the inputs in the order of the steps."""
        clients = self.clients
        first = clients[0].inputs
        due = first.new_empty((len(clients), self.samples[0].numel(), *first.shape[1:]))
        for place, client, samples in zip(due, clients, self.samples, strict=True):
            torch.index_select(client.inputs, 0, samples.flatten(), out=place)
        if self.tasks[0].augmentation is not None:
            for place, step in self.mask.any(2).nonzero().tolist():
                begin = step * self.num_rows
                rows = due[place, begin : begin + int(self.mask[place, step].sum())]
                rows.copy_(self.tasks[place].augment(rows, step))
        return due

    def labels(self) -> Tensor:
        """Return [clients, steps * rows]: the labels in the order of the steps."""
        pairs = zip(self.clients, self.samples, strict=True)
        return torch.stack([client.labels[samples.flatten()] for client, samples in pairs])


def make_schedule(
    tasks: Sequence[ClientTask],
    experiment: Experiment,
    training: LocalTraining | None = None,
    *,
    pads: bool = True,
) -> Schedule:
    """Return the steps of several clients together."""
    drawn = [(draw_batches(t.client, experiment, t.number, training), t) for t in tasks]
    drawn.sort(key=lambda each: len(each[0]), reverse=True)
    num_rows = max(len(batch) for batches, _ in drawn for batch in batches)
    shape = (len(drawn), len(drawn[0][0]), num_rows)
    device = tasks[0].client.labels.device
    samples = torch.zeros(shape, dtype=torch.int64, device=device)
    sizes = torch.zeros(shape[:2], dtype=torch.int64)
    for place, (batches, _) in enumerate(drawn):
        for step, batch in enumerate(batches):
            samples[place, step, : len(batch)] = batch
            sizes[place, step] = len(batch)
    mask = (torch.arange(num_rows) < sizes.unsqueeze(2)).to(device)
    num_steps = [len(batches) for batches, _ in drawn]
    return Schedule([task for _, task in drawn], samples, mask, num_steps, pads)


def batch_dims(batch: Batch) -> tuple[Any, ...]:
    """Return the dimension over which vmap runs for each part of a batch."""
    return Batch._make(None if part is None else 0 for part in batch)


def leaves_padding_out(method: Method) -> bool:
    """Return whether a loss is known to leave padding rows out: the package's own ones are.

    A user's loss may average over all rows that it is given.
    """
    return type(method).__module__.startswith("mpfedcl.")


class TrainedClients(ABC):
    """Some clients after their local training, in the order of `names`."""

    def __init__(
        self,
        clients: Sequence[ClientData],
        model: Model,
        losses: Sequence[float],
        states: Sequence[Tensors],
    ) -> None:
        self.names = [client.name for client in clients]
        self.losses = losses
        """Mean training loss of each client."""
        self.states = states
        """The state that each client keeps for the next round, next to parameters."""
        self._clients = clients
        self._model = model

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def averaged(self, index: int) -> Tensors | StackMember | None:
        """Return the tensors of a client to be averaged; None if the client withholds them."""

    @abstractmethod
    def params(self, index: int) -> Tensors:
        """Return a client's whole model; it shares no memory with the models of other clients."""

    @abstractmethod
    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples, in their order."""

    @abstractmethod
    def predict(self, some: Sequence[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...] of some clients' models on inputs."""


def predict_clients(
    group: TrainedClients, evaluator: Evaluator, wanted: Collection[str]
) -> Iterator[tuple[str, Predictions]]:
    """Yield the predictions of the wanted clients; few are held at a time."""
    places = [place for place, name in enumerate(group.names) if name in wanted]
    for first in range(0, len(places), evaluator.models_at_once):
        some = places[first : first + evaluator.models_at_once]
        names = [group.names[place] for place in some]
        yield from zip(names, evaluator.predict(partial(group.predict, some)), strict=True)


class TrainedClient(TrainedClients):
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
        super().__init__([client], model, [loss], [state])
        self._params = params
        self._averaged = averaged

    def averaged(self, index: int) -> Tensors | None:
        """Return what `finish` returned."""
        return self._averaged

    def params(self, index: int) -> Tensors:
        """Return the client's model."""
        return self._params

    def embed(self) -> list[Tensor]:
        """Return the embeddings of the client's training samples."""
        return [self._model.apply(self._params, self._clients[0].inputs)[0]]

    def predict(self, some: Sequence[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [1, B, ...]."""
        return as_stack(self._model.apply(self._params, inputs))


class TrainedStack(TrainedClients):
    """Several clients whose models are stacked: each parameter is one [clients, ...] tensor.

    `starts` are the shared parameters as each client received them; `finished` are the tensors that
    each client sends if the method overrides `finish`.
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
        super().__init__(clients, model, losses, states)
        self._params = params
        self._starts = starts
        self._shared = {name: params[name] for name in starts[0]}
        self._finished = finished

    def averaged(self, index: int) -> Tensors | StackMember | None:
        """Return the tensors of a client to be averaged: by default its part of the stack."""
        return StackMember(self, index) if self._finished is None else self._finished[index]

    def params(self, index: int) -> Tensors:
        """Return a copy of a client's model."""
        return {name: value[index].clone() for name, value in self._params.items()}

    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples."""
        # One by one: batched products of such sizes are slower, and sizes differ.
        return [
            self._model.apply(take_one(self._params, index), client.inputs)[0]
            for index, client in enumerate(self._clients)
        ]

    def predict(self, some: Sequence[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...]."""
        params = {name: value[list(some)] for name, value in self._params.items()}
        return self._model.apply_many(params, inputs)

    # As `messages.UpdateStack`

    @cached_property
    def template(self) -> Tensors:
        """One client's tensors, for their shapes."""
        return take_one(self._shared, 0)

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return the weighted sum over clients."""
        # A client of weight 0 may hold NaN, and 0 times NaN is NaN.
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
        """The squared norm of the change of each client's shared parameters."""
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
        """Return the shared parameters of one client."""
        return take_one(self._shared, index)


def stack_tensors(each: Sequence[Tensors]) -> Tensors:
    """Return the tensors of several clients as [clients, ...] by name."""
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def take_one(tensors: Tensors, index: int) -> Tensors:
    """Return the tensors of one client of a stack, as views."""
    return {name: value[index] for name, value in tensors.items()}


def take_some(tensors: Tensors, some: slice | Tensor) -> Tensors:
    """Return the tensors of some clients of a stack; views for a slice."""
    # As a tuple: the gradient of a slice that takes all needs no memory then.
    return {name: value[some,] for name, value in tensors.items()}


def take_first(tensors: Tensors, count: int) -> Tensors:
    """Return the tensors of the first clients of a stack."""
    return {name: value[:count] for name, value in tensors.items()}


def replace_values(params: Tensors, changed: Tensors, memory: Tensors) -> Tensors:
    """Change parameters in place as `after_step` returned them; return the method's memory."""
    # A method may swap the two, and they must not share memory.
    memory = {name: value.clone() for name, value in memory.items()}
    for name, value in params.items():
        value.copy_(changed[name])
    return memory


class Trainer(ABC):
    """A way to run the local training of several clients."""

    name: ClassVar[str]
    """The name in records."""

    def __init__(self, assembly: Assembly) -> None:
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model

    @abstractmethod
    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients of one round; every client is in one of the groups returned."""
