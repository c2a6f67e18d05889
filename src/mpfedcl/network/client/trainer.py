"""One client's work in one round: it evaluates the round before, and trains."""

import torch

from mpfedcl.data.client_data import FederatedData
from mpfedcl.engines import InProcessEngine
from mpfedcl.messages import Broadcast, Update
from mpfedcl.network.readings import ClientReadings
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.evaluation import (
    ClientReader,
    Evaluator,
    as_stack,
    count_confusions,
    estimate_own_priors,
)
from mpfedcl.tensors import Tensors


class ClientTrainer:
    """A client with its data and its model."""

    def __init__(self, assembly: Assembly, data: FederatedData) -> None:
        self._method, self._model, self._data = assembly.method, assembly.model, data
        self._name = data.names[0]
        self._initial = assembly.initial
        self._engine = InProcessEngine(assembly, data)

    def evaluate(
        self, broadcast: Broadcast, state: Tensors, is_personal: bool, with_confusion: bool
    ) -> ClientReadings:
        """Evaluate the round before: the client's own model after it, and the averaged one."""
        shares_all = all(self._method.shared(name) for name in self._initial)
        averaged = broadcast.params if shares_all else None
        personal = _group(state, "personal") if is_personal else None
        if is_personal and not self._method.trains:
            personal = self._personalize(broadcast)
        evaluator = Evaluator(
            self._data.test_inputs,
            self._data.test_labels,
            self._method.project,
            # The server sends what predictions are compared with.
            broadcast.pool if self._method.shares_prototypes else None,
            self._method.experiment.contrast.temperature,
        )
        predicted = [
            evaluator.predict(
                lambda inputs, p=params: as_stack(self._model.apply(p, inputs)),  # type: ignore[misc]
                with_similarities=params is averaged,
            )[0]
            if params
            else None
            for params in (personal, averaged)
        ]
        client, num_classes = self._data.clients[0], self._data.num_classes
        reader = ClientReader(self._data.test_labels, predicted[1], 1)
        label_counts = torch.bincount(client.labels, minlength=num_classes)
        estimated = estimate_own_priors(predicted[1], {client.name: client.test})
        table, said = reader.tables(
            predicted[0], client.test, label_counts, estimated.get(client.name)
        )
        main, counts = said.get(self._method.reading_on("own")), None
        if with_confusion and main is not None and len(client.test):
            counts = count_confusions(main, self._data.test_labels[client.test], num_classes)
        # Nobody here knows the others' test images.
        union = dict.fromkeys(table["union"])
        return ClientReadings({"own": table["own"], "union": union}, bool(personal), counts)

    def _personalize(self, broadcast: Broadcast) -> Tensors | None:
        """Return the own model of a client that does not train."""
        client, received = self._data.clients[0], self._method.prepare(broadcast)
        return self._method.personalize(received, client.inputs, client.labels)

    def train(self, broadcast: Broadcast, state: Tensors) -> tuple[Update, Tensors]:
        """Train; return the update, and the state to keep in case the server accepts it."""
        kept_before = {n: value for n, value in state.items() if not n.startswith("personal/")}
        kept = {_add_client(name, self._name): value for name, value in kept_before.items()}
        self._engine.restore(kept, {})
        (update,) = self._engine.train(broadcast, [self._name], keep=[self._name])
        self._engine.keep_accepted([self._name])
        personal = dict(self._engine.personal_models(broadcast.params)).get(self._name, {})
        kept = {
            _remove_client(name, self._name): value for name, value in self._engine.state().items()
        }
        kept |= {f"personal/{name}": value for name, value in personal.items()}
        return update.written_out(), kept


def _group(tensors: Tensors, name: str) -> Tensors:
    prefix = f"{name}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _add_client(key: str, client: str) -> str:
    """Return an engine's key for one of a client's state: kept/CLIENT/x for kept/x."""
    kind, _, name = key.partition("/")
    return f"{kind}/{client}/{name}"


def _remove_client(key: str, client: str) -> str:
    kind, _, name = key.partition("/")
    return f"{kind}/{name.removeprefix(f'{client}/')}"
