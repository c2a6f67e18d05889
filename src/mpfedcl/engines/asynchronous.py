"""The engine of asynchronous methods: each client is sent the model of its own moment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpfedcl.core.tensors import Tensors, take_group
from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines.in_process import InProcessEngine
from mpfedcl.engines.trainers.base import TrainedClient, TrainedClients
from mpfedcl.methods import Asynchronous
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import ArrivalEngine

_ANSWER = "answer"
"""The prefix of answers in a checkpoint."""


class DispatchingEngine(InProcessEngine, ArrivalEngine):
    """Train all dispatched clients together when the first of them is due.

    An update depends only on the broadcast and on the client's state, so it may be computed at any
    time before it arrives.
    """

    def __init__(self, assembly: Assembly, data: FederatedData) -> None:
        super().__init__(assembly, data)
        self._sent: dict[str, Broadcast] = {}
        """The broadcasts of the clients under way."""
        self._answers: dict[str, TrainedClient] = {}
        """The clients under way that have trained already."""
        self._keeps_models = False

    def begin_record(self, *, keep_models: bool) -> None:
        """Begin a record: forget the models that have arrived so far."""
        self._trained, self._keeps_models = {}, keep_models
        self._begin_round()

    def dispatch(self, broadcasts: Mapping[str, Broadcast]) -> None:
        """Send broadcasts to clients; a client under way keeps its earlier one."""
        self._sent = {**broadcasts, **self._sent}

    def answer(self, client: str) -> Update:
        """Return the update of a client under way."""
        if client not in self._answers:
            with self._clock.phase("train"):
                self._train_all_under_way()
        update = self._make_update(
            self._data.client(client), self._answers[client], 0, self._no_prototypes
        )
        return self._processors.outgoing(update, self._sent[client])

    def settle(self, client: str, *, seconds: float | None) -> None:
        """End a dispatch after this time; None: the update was rejected."""
        trained = self._answers.pop(client)
        del self._sent[client]
        if seconds is None:
            return
        self._keep_own(client, trained, 0)
        self._processors.keep_accepted([client])
        if client in self._states and isinstance(self._method, Asynchronous):
            self._states[client] = self._method.note_delay(self._states[client], seconds)
        if self._keeps_models:
            self._trained[client] = (trained, 0)

    def state(self) -> Tensors:
        """Return the clients' states and the answers under way."""
        found = super().state()
        for client, each in self._answers.items():
            averaged = each.averaged(0)
            told = torch.tensor([each.losses[0], averaged is None], dtype=torch.float64)
            parts = {
                "params": each.params(0),
                "averaged": averaged or {},
                "state": each.states[0],
                "told": {"loss": told},
            }
            for part, tensors in parts.items():
                for name, value in tensors.items():
                    found[f"{_ANSWER}/{client}/{part}/{name}"] = value
        return found

    def restore(
        self, state: Tensors, record: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Continue from the result of `state`."""
        super().restore(state, record, folder)
        self._sent, self._answers = {}, {}
        answers: dict[str, dict[str, Tensors]] = {}
        for key, value in take_group(state, f"{_ANSWER}/").items():
            client, part, name = key.split("/", 2)
            parts = answers.setdefault(client, {"averaged": {}, "state": {}})
            parts.setdefault(part, {})[name] = value.to(self._data.test_inputs.device)
        for client, parts in answers.items():
            loss, is_withheld = parts["told"]["loss"].tolist()
            self._answers[client] = TrainedClient(
                self._data.client(client),
                self._model,
                {name: parts["params"][name] for name in self._assembly.initial},
                averaged=None if is_withheld else parts["averaged"],
                state=parts["state"],
                loss=loss,
            )

    def _train_all_under_way(self) -> None:
        groups: dict[tuple[int, int | None], list[str]] = {}
        # A stack has one learning rate and one value of `prepare`.
        for name in sorted(self._sent.keys() - self._answers.keys()):
            sent = self._sent[name]
            key = (sent.round, None if self._method.prepare(sent) is None else sent.version)
            groups.setdefault(key, []).append(name)
        for (round_number, _), group in groups.items():
            received = self._method.prepare(self._sent[group[0]])
            for first in range(0, len(group), self._clients_at_once):
                names = group[first : first + self._clients_at_once]
                tasks = [self._make_task(self._data.client(n), self._sent[n]) for n in names]
                for trained in self._trainers.train(tasks, round_number, received):
                    self._take(trained)

    def _take(self, group: TrainedClients) -> None:
        """Keep clients separately: a stack would stay in memory until its last client arrives."""
        if isinstance(group, TrainedClient):
            self._answers[group.names[0]] = group
            return
        for index, name in enumerate(group.names):
            averaged = group.averaged(index)
            if isinstance(averaged, StackMember):
                averaged = averaged.stack.tensors(averaged.index)
            self._answers[name] = TrainedClient(
                self._data.client(name),
                self._model,
                group.params(index),
                averaged=None if averaged is None else _copy(averaged),
                state=_copy(group.states[index]),
                loss=group.losses[index],
            )


def _copy(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}
