"""The reference engine: clients one after the other, in plain PyTorch."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpfedcl.clock import Clock
from mpfedcl.data.federated import ClientData, FederatedData
from mpfedcl.descent import Descent
from mpfedcl.exchange import Broadcast, Update
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.models import Model, Tensors
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.readings import Examiner, Readings, tabulate
from mpfedcl.rng import generator, seed_for

_CLIENTS_AT_ONCE = 32
"""Clients that are clustered together: enough to batch well, few enough to bound the memory."""


class LoopEngine:
    """Trains clients in turn; clusters the embeddings of several at once."""

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        model: Model,
        data: FederatedData,
        initial: Tensors,
        clock: Clock,
    ) -> None:
        self.sizes = {client.name: len(client.labels) for client in data.clients}
        self._experiment = experiment
        self._method = method
        self._model = model
        self._data = data
        self._initial = initial
        self._clock = clock
        self._states: dict[str, Tensors] = {}
        self._kept: dict[str, Tensors] = {}
        # Of the round under way, until `settle`:
        self._trained: dict[str, Tensors] = {}
        self._new_states: dict[str, Tensors] = {}

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update]:
        """Train the named clients and yield their updates in name order."""
        with self._clock.phase("broadcast"):
            received = self._method.prepare(broadcast)
        self._trained, self._new_states = {}, {}
        ordered = sorted(names)
        for first in range(0, len(ordered), _CLIENTS_AT_ONCE):
            clients = [self._data.client(name) for name in ordered[first:][:_CLIENTS_AT_ONCE]]
            with self._clock.phase("train"):
                results = [self._train(client, broadcast, received) for client in clients]
            rows = self._summarize(clients, broadcast.round)
            for client, (sums, loss), prototypes in zip(clients, results, rows, strict=True):
                yield Update(client.name, len(client.labels), sums, prototypes, loss)

    def evaluate(
        self, averaged: Tensors | None, pool: PrototypePool | None, names: Sequence[str]
    ) -> Readings:
        """Read the personal models of this round and the averaged model, on both tests."""
        if pool is None and averaged is not None:
            pool = self._pool_for_reading(names)
        examiner = Examiner(
            self._model,
            self._data.test_inputs,
            self._data.test_labels,
            self._method.project,
            None if pool is None else self._method.reference(pool),
        )
        shared_marks = None if averaged is None else examiner.mark(averaged)
        tables = {}
        for client in self._data.clients:
            trained = client.name in names
            marks = examiner.mark(self._trained[client.name]) if trained else None
            tables[client.name] = tabulate(marks, shared_marks, client.test)
        return Readings(tables, names)

    def settle(self, accepted: Sequence[str]) -> None:
        """Keep the accepted clients' new states; a rejected one has not trained at all."""
        self._trained = {n: params for n, params in self._trained.items() if n in accepted}
        for name, params in self._trained.items():
            self._states[name] = self._new_states[name]
            at_home = {n: value for n, value in params.items() if not self._method.shared(n)}
            if at_home:
                self._kept[name] = at_home

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield what each client would predict with: its last own model, where it keeps one."""
        for client in self._data.clients:
            if client.name in self._trained:
                yield client.name, self._trained[client.name]
            elif client.name in self._kept:
                yield client.name, {**self._initial, **shared, **self._kept[client.name]}

    def state(self) -> Tensors:
        """Return parameters kept at home and the method's client states, by client."""
        kept = {f"kept/{c}/{n}": v for c, part in self._kept.items() for n, v in part.items()}
        own = {f"own/{c}/{n}": v for c, part in self._states.items() for n, v in part.items()}
        return {**kept, **own}

    def load_state(self, state: Tensors) -> None:
        """Take up what `state` returned."""
        self._kept, self._states = {}, {}
        for key, value in state.items():
            kind, client, name = key.split("/", 2)
            home = self._kept if kind == "kept" else self._states
            home.setdefault(client, {})[name] = value.to(self._data.test_inputs.device)

    def _train(
        self, client: ClientData, broadcast: Broadcast, received: object
    ) -> tuple[Tensors, float]:
        """Train one client for a round; return what it shares and its mean loss."""
        start = {**self._initial, **self._kept.get(client.name, {}), **broadcast.params}
        state = self._states.get(client.name)
        if state is None:
            state = self._method.init_client(start)
        context = Context(self._model.apply, start, received, state)
        params, loss, num_steps = self._descend(client, broadcast.round, context)
        sums, self._new_states[client.name] = self._method.finish(params, context, num_steps)
        self._trained[client.name] = params
        return sums, loss

    def _descend(
        self, client: ClientData, round_number: int, context: Context
    ) -> tuple[Tensors, float, int]:
        """Run the local epochs of SGD; return the parameters, the mean loss and the steps."""
        train = self._experiment.train
        params = {n: v.detach().clone().requires_grad_() for n, v in context.start.items()}
        descent = Descent(params, train.lr * train.lr_decay ** (round_number - 1), train.momentum)
        losses = torch.zeros((), dtype=torch.float64, device=client.inputs.device)
        num_steps = 0
        for epoch in range(train.epochs):
            for batch in self._batches(client, round_number, epoch):
                loss = self._method.loss(params, batch, context)
                gradients = torch.autograd.grad(loss, list(params.values()))
                adjusted = self._method.adjust(
                    dict(zip(params, gradients, strict=True)), params, context
                )
                descent.step([adjusted[name] for name in params])
                losses += loss.detach() * len(batch.labels)
                num_steps += 1
        trained = {name: value.detach() for name, value in params.items()}
        return trained, float(losses) / (train.epochs * len(client.labels)), num_steps

    def _batches(self, client: ClientData, round_number: int, epoch: int) -> Iterator[Batch]:
        key = generator(self._experiment.seed, round_number, client.name, "batches", epoch)
        order = torch.randperm(len(client.labels), generator=key).to(client.inputs.device)
        for chosen in torch.split(order, min(len(order), self._experiment.train.batch_size)):
            everyone = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device)
            yield Batch(client.inputs[chosen], client.labels[chosen], everyone)

    def _summarize(self, clients: Sequence[ClientData], round_number: int) -> list[Prototypes]:
        """Return the clients' prototypes, or none of them where the method shares none."""
        if not self._method.shares_prototypes:
            return [self._no_prototypes()] * len(clients)
        with self._clock.phase("embed"):
            embeddings = [self._embed(client) for client in clients]
        with self._clock.phase("cluster"):
            return self._cluster(clients, embeddings, round_number)

    @torch.no_grad()
    def _embed(self, client: ClientData) -> Tensor:
        embeddings, _ = self._model.apply(self._trained[client.name], client.inputs)
        return self._method.project(embeddings)

    def _cluster(
        self, clients: Sequence[ClientData], embeddings: Sequence[Tensor], round_number: int
    ) -> list[Prototypes]:
        seed = self._experiment.seed
        # A client whose training has blown up sends no prototypes; the guard deals with its model.
        sound = [number for number, each in enumerate(embeddings) if _is_sound(each)]
        rows = self._method.summarize(
            [embeddings[number] for number in sound],
            [clients[number].labels for number in sound],
            [seed_for(seed, round_number, clients[n].name, "clusters") for n in sound],
        )
        found = dict(zip(sound, rows, strict=True))
        return [found.get(number, self._no_prototypes()) for number in range(len(clients))]

    def _no_prototypes(self) -> Prototypes:
        like = next(iter(self._initial.values()))
        return Prototypes.empty(self._model.embedding_size, like.dtype, like.device)

    def _pool_for_reading(self, names: Sequence[str]) -> PrototypePool | None:
        """Make prototypes that never travel, to read a method without any by nearest prototype."""
        if not names:
            return None
        clients = [self._data.client(name) for name in names]
        rows = self._cluster(clients, [self._embed(client) for client in clients], 0)
        return PrototypePool.gather(
            {client.name: each for client, each in zip(clients, rows, strict=True)},
            num_classes=self._data.num_classes,
            num_prototypes=self._method.num_prototypes,
        )


def _is_sound(embeddings: Tensor) -> bool:
    """Tell whether embeddings can be clustered: all finite, and so are their squares."""
    return bool(embeddings.square().sum(dtype=torch.float64) < 1e30)
