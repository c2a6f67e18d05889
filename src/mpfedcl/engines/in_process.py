"""The engine of one process: it keeps the clients' states and leaves the training to a trainer."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines.client_evaluation import ClientEvaluation
from mpfedcl.engines.client_groups import group_clients
from mpfedcl.engines.client_prototypes import ClientPrototypes
from mpfedcl.engines.client_states import ClientStates, restore_states
from mpfedcl.engines.handover import Handover
from mpfedcl.engines.trained_clients import (
    TrainedClients,
    TrainedStack,
)
from mpfedcl.engines.trainer import ClientTask
from mpfedcl.engines.trainer_choice import TrainerChoice
from mpfedcl.methods import (
    ClosedForm,
    CollectsStatistics,
    collect_statistics,
    prototype_rule,
    shares_prototypes_in,
)
from mpfedcl.methods.messages import Broadcast, Update, fill_part
from mpfedcl.models.parts import mask_params
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine, StatePlace
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.processors import ProcessorChain

CLIENTS_AT_ONCE = 64
"""Clients that are trained and clustered together: enough to batch well."""
_NUMBERS_AT_ONCE = 2**26
"""Parameters that may be held for them at a time: few enough to bound the memory."""


class InProcessEngine(Engine):
    """Runs clients in this process, several at once where that is faster."""

    def __init__(self, assembly: Assembly, data: FederatedData) -> None:
        self.sizes = data.sizes
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model
        self._data = data
        self._initial = assembly.initial
        self._clock = assembly.clock
        self._processors = ProcessorChain(assembly.experiment)
        self._trainers = TrainerChoice(assembly)
        self._prototypes = ClientPrototypes(assembly)
        self._local_parameters, self._states, unsent = self._kept = [
            ClientStates(kind, self.sizes, data.test_inputs.device)
            for kind in ("kept", "own", "unsent")
        ]
        self._processors.keep_in(unsent)
        self._trained: dict[str, tuple[TrainedClients, int]] = {}
        """The clients of the round under way, and after it those whose models were asked for."""
        self._requested_names: set[str] = set()
        self._begun_elsewhere: tuple[str, Handover] | None = None
        """The client whose first steps another process takes."""
        self._prepared: tuple[Broadcast, Any] | None = None

    def begin_for_another(
        self, client: ClientData, part: float, broadcast: Broadcast, handover: Handover
    ) -> None:
        """Take the first steps of a client that another process answers for."""
        received = self._prepare(broadcast)
        with self._clock.phase("train"):
            task = self._make_task(client, broadcast)
            handover.give(
                broadcast.round,
                task.start,
                lambda memory: self._trainers.begin(task, broadcast.round, received, part, memory),
            )

    def begin_elsewhere(self, name: str, handover: Handover) -> None:
        """Let another process take the first steps of one of the clients here, in all rounds."""
        self._begun_elsewhere = name, handover

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update]:
        """Train the named clients and yield their updates, by name but for one begun elsewhere."""
        self._trained, self._requested_names = {}, set(keep)
        self._begin_round()
        updates = self._train if self._method.trains else self._collect
        for update in updates(broadcast, sorted(names)):
            with self._clock.phase("train"):
                processed = self._processors.outgoing(update, broadcast)
            yield processed
        self._prepared = None
        self._processors.end_round()

    def _begin_round(self) -> None:
        self._trainers.begin_round()
        for kept in self._kept:
            kept.begin_round()

    def _collect(self, broadcast: Broadcast, ordered: Sequence[str]) -> Iterator[Update]:
        """Let clients send what a method that does not train makes of their samples."""
        for clients in group_clients(map(self._data.client, ordered), CLIENTS_AT_ONCE):
            with self._clock.phase("train"):
                parts: Sequence[Mapping[str, Tensor]] = [{} for _ in clients]
                if isinstance(self._method, CollectsStatistics):
                    parts = self._method.collect_many(
                        [each.inputs for each in clients], [each.labels for each in clients]
                    )
            for each, summed in zip(clients, parts, strict=True):
                nothing, count = self._prototypes.none(), len(each.labels)
                yield Update(each.name, count, {}, nothing, None, summed=summed)

    def _train(self, broadcast: Broadcast, ordered: Sequence[str]) -> Iterator[Update]:
        received = self._prepare(broadcast)
        for names in self._in_turn(ordered):
            clients = [self._data.client(name) for name in names]
            with self._clock.phase("train"):
                tasks = [self._make_task(client, broadcast) for client in clients]
                for trained in self._train_tasks(tasks, broadcast.round, received):
                    self._remember(trained)
            rows = self._summarize(clients, broadcast.round)
            for client, prototypes in zip(clients, rows, strict=True):
                trained, index = self._trained[client.name]
                update = Update(
                    client.name,
                    len(client.labels),
                    trained.averaged(index),
                    prototypes,
                    trained.losses[index],
                    summed=collect_statistics(self._method, client.inputs, client.labels),
                )
                yield fill_part(update, broadcast) if client.name in broadcast.units else update
            if not self._has_client_state:
                # The updates are out: nobody will ask for the other models again.
                self._trained = self._requested()

    def _prepare(self, broadcast: Broadcast) -> Any:
        """Return what the method makes of a broadcast, once for each."""
        if self._prepared is None or self._prepared[0] is not broadcast:
            with self._clock.phase("broadcast"):
                self._prepared = broadcast, self._method.prepare(broadcast)
        return self._prepared[1]

    def _in_turn(self, ordered: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the clients that are trained and clustered together; last one begun elsewhere."""
        begun = self._begun_elsewhere[0] if self._begun_elsewhere else None
        turns = [name for name in ordered if name != begun] + [n for n in ordered if n == begun]
        for first in range(0, len(turns), self._clients_at_once):
            yield turns[first : first + self._clients_at_once]

    def _train_tasks(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        name, handover = self._begun_elsewhere or (None, None)
        whole = [task for task in tasks if task.client.name != name]
        done = self._trainers.train(whole, round_number, received) if whole else []
        for task in tasks:
            if handover is not None and task.client.name == name:
                begun, memory = handover.take(round_number, task.start)
                done += self._trainers.finish(task, round_number, received, begun, memory)
        return done

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation:
        """Read the personal models of this round and the global model, on both tests."""
        names, predictors = self.readable(names), self.predictors
        wanted = predictors.wanted(is_complete=with_confusion)
        if pool is None and predictors.needs_pool(averaged, wanted):
            pool = self.pool_for_evaluation(self.prototypes_for_evaluation(names))
        said = predictors.predict_global(averaged, pool, wanted)
        return predictors.read(
            said, pool, self.trained(names), wanted, with_confusion=with_confusion
        )

    @cached_property
    def predictors(self) -> ClientEvaluation:
        """Reads the clients of this process."""
        return ClientEvaluation.of(self._method, self._model, self._data)

    def readable(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of the named clients that have a model of their own to be read."""
        return names if self._method.trains else [n for n in names if n in self._trained]

    def trained(self, names: Sequence[str]) -> dict[str, TrainedClients]:
        """Return the groups that hold these clients' models."""
        return {name: self._trained[name][0] for name in names}

    def prototypes_for_evaluation(self, names: Sequence[str]) -> dict[str, Prototypes]:
        """Make prototypes that never travel, to read a method without any by nearest prototype."""
        clients = [self._data.client(name) for name in names]
        rows = self._prototypes.cluster(clients, self._embed(clients), 0)
        return {client.name: each for client, each in zip(clients, rows, strict=True)}

    def pool_for_evaluation(self, rows: dict[str, Prototypes]) -> PrototypePool | None:
        """Return these prototypes as a pool, or None where there is no client."""
        if not rows:
            return None
        return PrototypePool.gather(
            rows,
            num_classes=self._data.num_classes,
            num_prototypes=prototype_rule(self._method).num_prototypes,
        )

    def remarks(self) -> dict[str, Any]:
        """Return how the clients of the round were trained."""
        return {"training": told} if (told := self._trainers.describe_round()) else {}

    def keep_accepted(
        self, accepted: Sequence[str], following: Callable[[], Broadcast] | None = None
    ) -> None:
        """Keep the accepted clients' new states; a rejected one has not trained at all."""
        with self._clock.phase("aggregate"):
            self._keep_states(set(accepted))
            self._processors.keep_accepted(accepted)
        self._trained = self._requested()
        if not self._method.trains and following is not None:
            with self._clock.phase("train"):
                self._personalize([n for n in accepted if n in self._requested_names], following())

    def _personalize(self, names: Sequence[str], broadcast: Broadcast) -> None:
        """Let clients that do not train make their own models of what the round has brought."""
        if not isinstance(self._method, ClosedForm):
            return
        received = self._method.prepare(broadcast)
        clients, models = [], []
        for client in (self._data.client(name) for name in names):
            params = self._method.personalize(received, client.inputs, client.labels)
            if params is not None:
                clients.append(client)
                models.append(params)
        if models:
            stack = {name: torch.stack([each[name] for each in models]) for name in models[0]}
            losses = [math.nan] * len(clients)
            states: list[Tensors] = [{} for _ in clients]
            starts: list[Tensors] = [{} for _ in clients]
            self._remember(
                TrainedStack(
                    clients, self._model, stack, starts=starts, states=states, losses=losses
                )
            )

    def _keep_states(self, held: set[str]) -> None:
        self._trained = {n: place for n, place in self._trained.items() if n in held}
        for name, (trained, index) in self._trained.items():
            self._keep_own(name, trained, index)

    def _keep_own(self, name: str, trained: TrainedClients, index: int) -> None:
        """Keep what a client takes along to its next round."""
        if trained.states[index]:
            # Copies: a view of a stack would keep the whole stack in memory.
            self._states[name] = {n: v.clone() for n, v in trained.states[index].items()}
        if self._has_local_parameters:
            params = trained.params(index)
            self._local_parameters[name] = {
                n: v for n, v in params.items() if not self._method.shared(n)
            }

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield what each client would predict with: its last own model, where it keeps one."""
        for name in self._data.names:
            if name in self._trained:
                trained, index = self._trained[name]
                yield name, trained.params(index)
            elif name in self._local_parameters:
                yield name, {**self._initial, **shared, **self._local_parameters[name]}

    def keep_states_in(self, place: StatePlace) -> None:
        """Say where states may be kept that are too many for the memory."""
        for kept in self._kept:
            kept.keep_in(place, some_rest=self._experiment.fraction < 1)

    def state(self) -> Tensors:
        """Return what is kept by client: parameters, the method's states, what is unsent."""
        return {name: value for kept in self._kept for name, value in kept.snapshot().items()}

    def sync_state(self) -> None:
        """Wait until what is kept in files is on disk."""
        for kept in self._kept:
            kept.sync()

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; what belongs to clients elsewhere is passed over."""
        restore_states(self._kept, state)

    @property
    def _clients_at_once(self) -> int:
        size = sum(value.numel() for value in self._initial.values())
        return max(1, min(CLIENTS_AT_ONCE, _NUMBERS_AT_ONCE // size))

    @property
    def _has_local_parameters(self) -> bool:
        return any(not self._method.shared(name) for name in self._initial)

    @property
    def _has_client_state(self) -> bool:
        """Whether clients take something along to the next round."""
        # Only a `finish` of the method's own returns a state; whether it does shows when it runs.
        return self._has_local_parameters or not self._method.plain_steps

    def _requested(self) -> dict[str, tuple[TrainedClients, int]]:
        return {
            name: place for name, place in self._trained.items() if name in self._requested_names
        }

    def _make_task(self, client: ClientData, broadcast: Broadcast) -> ClientTask:
        start = {**self._initial, **self._local_parameters.get(client.name, {}), **broadcast.params}
        units = broadcast.units.get(client.name, {})
        if units:
            # In a network of ReLUs this is all: what is zero has no slope, and stays zero.
            masks = mask_params(broadcast.params, units)
            start |= {n: start[n].masked_fill(~mask, 0) for n, mask in masks.items()}
        state = self._states.get(client.name)
        if state is None:
            state = self._method.init_client(start)
        own = self._method.describe(client.labels)
        return ClientTask(
            client, start, state, own, is_part=bool(units), dispatch=broadcast.dispatch
        )

    def _remember(self, trained: TrainedClients) -> None:
        self._trained |= {name: (trained, index) for index, name in enumerate(trained.names)}

    def _summarize(self, clients: Sequence[ClientData], round_number: int) -> list[Prototypes]:
        """Return the clients' prototypes, or none of them where the method shares none."""
        if not shares_prototypes_in(self._method, round_number):
            return [self._prototypes.none()] * len(clients)
        with self._clock.phase("embed"):
            embeddings = self._embed(clients)
        with self._clock.phase("cluster"):
            return self._prototypes.cluster(clients, embeddings, round_number)

    def _embed(self, clients: Sequence[ClientData]) -> list[Tensor]:
        groups = (self._trained[client.name][0] for client in clients)
        return self._prototypes.embed(clients, groups)
