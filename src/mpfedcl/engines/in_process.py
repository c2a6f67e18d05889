"""The engine of one process: keeps the clients' states, trains and evaluates the clients."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.rng import seed_for
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines.client_states import ClientStates
from mpfedcl.engines.evaluation import ClientEvaluation
from mpfedcl.engines.trainers import TrainerChoice, TrainersByModel
from mpfedcl.engines.trainers.augmentation import Augmentation
from mpfedcl.engines.trainers.base import (
    ClientTask,
    TrainedClients,
    TrainedStack,
    stack_tensors,
    weigh_classes,
)
from mpfedcl.engines.worker_group import WorkerGroup
from mpfedcl.methods import (
    ClosedForm,
    collect_statistics,
    prototype_rule,
    shares_prototypes_in,
)
from mpfedcl.methods.messages import Broadcast, Update, fill_part
from mpfedcl.models.units import mask_params
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.assembly import Assembly, split_buffers
from mpfedcl.rounds.engine import Engine, Members
from mpfedcl.rounds.evaluation import (
    RoundEvaluation,
    is_wanted,
    wanted_predictors,
)
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.prototype_pool import exchange_prototypes

CLIENTS_AT_ONCE = 64
"""Clients that are trained and clustered together: enough for large batches."""
_VALUES_AT_ONCE = 2**26
"""Parameters of all clients that are trained together, to bound the memory."""


class InProcessEngine(Engine):
    """Run clients in this process, several at once if that is faster."""

    _group: WorkerGroup | None = None
    """The processes that share the clients, if there are several."""

    def __init__(self, assembly: Assembly, data: FederatedData) -> None:
        self.members = Members(data.sizes)
        self._assembly = assembly
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model
        self._data = data
        self._clock = assembly.clock
        self._processors = ProcessorChain(assembly.experiment)
        self._trainers = TrainersByModel(assembly) if assembly.clients else TrainerChoice(assembly)
        self._augmentation = Augmentation.of(assembly.experiment, data)
        self._rule = prototype_rule(assembly.method)
        parts = {assembly, *map(assembly.of, data.names)}
        size = max(sum(value.numel() for value in each.initial.values()) for each in parts)
        self._clients_at_once = max(1, min(CLIENTS_AT_ONCE, _VALUES_AT_ONCE // size))
        self._has_local_parameters = not all(map(self._method.shared, assembly.initial))
        like = next(iter(assembly.initial.values()))
        self._no_prototypes = Prototypes.empty(
            assembly.model.embedding_size, like.dtype, like.device
        )
        self._local_parameters, self._states, unsent = self._kept = [
            ClientStates(kind, data.sizes, data.test_inputs.device)
            for kind in ("kept", "own", "unsent")
        ]
        self._processors.keep_in(unsent)
        self._trained: dict[str, tuple[TrainedClients, int]] = {}
        """The clients of the current round; after it, those in `keep`."""
        self._requested_names: set[str] = set()

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        """Train the named clients and yield their updates in name order."""
        self._trained, self._requested_names = {}, set(keep)
        self._begin_round()
        work = self._train if self._method.trains else self._collect
        for update in work(broadcast, sorted(self.members.here(names))):
            with self._clock.phase("train"):
                processed = self._processors.outgoing(update, broadcast)
            yield processed

    def _begin_round(self) -> None:
        self._trainers.begin_round()
        for kept in self._kept:
            kept.begin_round()

    def _collect(self, broadcast: Broadcast, ordered: Sequence[str]) -> Iterator[Update]:
        """Collect the statistics of clients for a method that does not train."""
        for client in map(self._data.client, ordered):
            with self._clock.phase("train"):
                summed = collect_statistics(self._method, client.inputs, client.labels)
            count = len(client.labels)
            yield Update(client.name, count, {}, self._no_prototypes, None, summed=summed)

    def _train(self, broadcast: Broadcast, ordered: Sequence[str]) -> Iterator[Update]:
        with self._clock.phase("broadcast"):
            received = self._method.prepare(broadcast)
        for first in range(0, len(ordered), self._clients_at_once):
            names = ordered[first : first + self._clients_at_once]
            clients = [self._data.client(name) for name in names]
            with self._clock.phase("train"):
                tasks = [self._make_task(client, broadcast) for client in clients]
                for trained in self._trainers.train(tasks, broadcast.round, received):
                    self._remember(trained)
            rows = self._summarize(clients, broadcast.round)
            for client, prototypes in zip(clients, rows, strict=True):
                trained, index = self._trained[client.name]
                update = self._make_update(client, trained, index, prototypes)
                yield fill_part(update, broadcast) if client.name in broadcast.units else update
            if self._method.plain_steps and not self._has_local_parameters:
                # Clients keep nothing: the updates are out, and models are not needed again.
                self._trained = self._requested()

    def _make_update(
        self, client: ClientData, trained: TrainedClients, index: int, prototypes: Prototypes
    ) -> Update:
        """Return the update of a trained client."""
        summed = collect_statistics(self._method, client.inputs, client.labels)
        sent, loss = trained.averaged(index), trained.losses[index]
        return Update(client.name, len(client.labels), sent, prototypes, loss, summed=summed)

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Evaluate the personal models of this round and the global model on both test sets."""
        # Only methods that train have a personal model of every client.
        own = [name for name in self.members.here(names) if name in self._trained]
        wanted = wanted_predictors(self._method, is_complete=with_confusion)
        if pool is None and averaged is not None and is_wanted(wanted, rule="prototype"):
            pool = self._pool_for_evaluation(own)
        predicted = self.predictors.predict_global(averaged, pool, wanted, self._group)
        trained = {name: self._trained[name][0] for name in own}
        return self.predictors.read(
            predicted, pool, trained, wanted, with_confusion=with_confusion, group=self._group
        )

    @cached_property
    def predictors(self) -> ClientEvaluation:
        """Evaluates the clients of this process."""
        return ClientEvaluation(self._method, self._model, self._data)

    def _pool_for_evaluation(self, names: Sequence[str]) -> PrototypePool | None:
        """Make a pool for evaluation only, for methods that share no prototypes."""
        clients = [self._data.client(name) for name in names]
        found = self._cluster(clients, self._embed(clients), 0)
        rows = dict(zip(names, found, strict=True))
        if self._group is not None:
            _, rows = exchange_prototypes(None, rows, self._group)
        if not rows:
            return None
        return PrototypePool.gather(
            rows,
            num_classes=self._data.num_classes,
            num_prototypes=self._rule.num_prototypes,
        )

    def remarks(self) -> dict[str, Any]:
        """Return how the clients of the round were trained."""
        return {"training": counts} if (counts := self._trainers.describe_round()) else {}

    def keep(
        self, accepted: Sequence[str], following: Callable[[], Broadcast] | None = None
    ) -> None:
        """Keep the new states of accepted clients; those of rejected clients stay as they were."""
        accepted = self.members.here(accepted)
        with self._clock.phase("aggregate"):
            self._trained = {n: self._trained[n] for n in accepted if n in self._trained}
            for name, (trained, index) in self._trained.items():
                self._keep_own(name, trained, index)
            self._processors.keep_accepted(accepted)
        self._trained = self._requested()
        if not self._method.trains and following is not None:
            with self._clock.phase("train"):
                self._personalize([n for n in accepted if n in self._requested_names], following())

    def _personalize(self, names: Sequence[str], broadcast: Broadcast) -> None:
        """Make the personal models of clients that do not train from the next broadcast."""
        if not isinstance(self._method, ClosedForm):
            return
        received = self._method.prepare(broadcast)
        clients, models = [], []
        for client in map(self._data.client, names):
            params = self._method.personalize(received, client.inputs, client.labels)
            if params is not None:
                clients.append(client)
                models.append(params)
        if models:
            nothing: list[Tensors] = [{}] * len(clients)
            stack, losses = stack_tensors(models), [math.nan] * len(clients)
            self._remember(
                TrainedStack(
                    clients, self._model, stack, starts=nothing, states=nothing, losses=losses
                )
            )

    def _keep_own(self, name: str, trained: TrainedClients, index: int) -> None:
        """Keep the state and the local parameters of a client for its next round."""
        if trained.states[index]:
            # Copies: a view of a stack would keep the whole stack in memory.
            self._states[name] = {n: v.clone() for n, v in trained.states[index].items()}
        if self._has_local_parameters:
            params = trained.params(index)
            self._local_parameters[name] = {
                n: v for n, v in params.items() if not self._method.shared(n)
            }

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield the last personal model of each client that has one."""
        for name in self._data.names:
            if name in self._trained:
                trained, index = self._trained[name]
                yield name, trained.params(index)
            elif name in self._local_parameters:
                initial = self._assembly.of(name).initial
                yield name, {**initial, **shared, **self._local_parameters[name]}

    def state(self) -> Tensors:
        """Return the local parameters, the method's states and the unsent updates, by client."""
        return {name: value for kept in self._kept for name, value in kept.snapshot().items()}

    def restore(
        self, state: Tensors, record: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Continue from the result of `state`; clients of other processes are skipped."""
        for kept in self._kept:
            if folder is not None:
                some_rest = self._experiment.fraction < 1
                kept.keep_in(folder, sorted(self.sizes), some_rest=some_rest)
            kept.restore(state, record.get("round", 0))

    def _requested(self) -> dict[str, tuple[TrainedClients, int]]:
        return {
            name: place for name, place in self._trained.items() if name in self._requested_names
        }

    def _make_task(self, client: ClientData, broadcast: Broadcast) -> ClientTask:
        part, kept = self._assembly.of(client.name), self._local_parameters.get(client.name, {})
        start = {**part.initial, **kept, **broadcast.params}
        units = broadcast.units.get(client.name, {})
        if units:
            # In a network of ReLUs this suffices: zeros have no gradient and stay zero.
            masks = mask_params(broadcast.params, units)
            start |= {n: start[n].masked_fill(~mask, 0) for n, mask in masks.items()}
        state = self._states.get(client.name)
        if state is None:
            state = part.method.init_client(split_buffers(start, part.model)[0])
        own = self._method.describe(client.labels)
        number = broadcast.round if broadcast.dispatch is None else broadcast.dispatch
        weights = None
        if self._experiment.train.class_weights == "balanced":
            weights = weigh_classes(client.labels, next(iter(start.values())).dtype)
        return ClientTask(
            client,
            start,
            state,
            own,
            number,
            is_part=bool(units),
            weights=weights,
            augmentation=self._augmentation,
        )

    def _remember(self, trained: TrainedClients) -> None:
        self._trained |= {name: (trained, index) for index, name in enumerate(trained.names)}

    def _summarize(self, clients: Sequence[ClientData], round_number: int) -> list[Prototypes]:
        """Return the clients' prototypes; empty ones if the method shares none in this round."""
        if not shares_prototypes_in(self._method, round_number):
            return [self._no_prototypes] * len(clients)
        with self._clock.phase("embed"):
            embeddings = self._embed(clients)
        with self._clock.phase("cluster"):
            return self._cluster(clients, embeddings, round_number)

    @torch.no_grad()
    def _embed(self, clients: Sequence[ClientData]) -> list[Tensor]:
        """Return the clients' embeddings of their own samples, in the space of prototypes."""
        found = {
            name: self._rule.project(embeddings)
            for group in dict.fromkeys(self._trained[client.name][0] for client in clients)
            for name, embeddings in zip(group.names, group.embed(), strict=True)
        }
        return [found[client.name] for client in clients]

    def _cluster(
        self, clients: Sequence[ClientData], embeddings: Sequence[Tensor], round_number: int
    ) -> list[Prototypes]:
        """Return each client's prototypes."""
        # A client whose training diverged sends no prototypes; validation rejects its model.
        # Embeddings can be clustered if they and their squares are finite.
        usable = [
            len(each) if float(each.square().sum(dtype=torch.float64)) < 1e30 else 0
            for each in embeddings
        ]
        seed = self._experiment.seed
        return self._rule.summarize(
            [each[:size] for each, size in zip(embeddings, usable, strict=True)],
            [client.labels[:size] for client, size in zip(clients, usable, strict=True)],
            [seed_for(seed, round_number, client.name, "clusters") for client in clients],
        )
