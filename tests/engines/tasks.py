"""Small tasks for trainers, without files: clients with random inputs, a model, a method."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trainers.base import ClientTask, TrainedClients
from mpfedcl.engines.trainers.direct import DirectTrainer
from mpfedcl.engines.trainers.factored import FactoredClients, FactoredTrainer
from mpfedcl.engines.trainers.find_linear_layers import Layer, find_layers
from mpfedcl.engines.trainers.loop import LoopTrainer
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method
from mpfedcl.methods.messages import Broadcast
from mpfedcl.models import Mlp, Model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble

NUM_INPUTS, NUM_CLASSES = 5, 3


def draw(seed: int, *shape: int) -> Tensor:
    key = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=key, dtype=torch.float64)


def make_client(size: int, number: int = 0) -> ClientData:
    key = torch.Generator().manual_seed(100 + number)
    return ClientData(
        f"client-{number}",
        draw(number, size, NUM_INPUTS),
        torch.randint(0, NUM_CLASSES, (size,), generator=key),
        torch.zeros(0, dtype=torch.int64),
    )


def settings(**changes: Any) -> Experiment:
    common = {"dtype": "float64", "train__lr": 0.2, "train__batch_size": 4}
    return Experiment().replace(**common | changes)


class Task:
    """Some clients, a model and a method, in one round."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        method: type[Method] = Method,
        model: Model | None = None,
        clients: Mapping[int, ClientData] | None = None,
        **changes: Any,
    ) -> None:
        self.experiment = settings(**changes)
        self.model: Model = model or Mlp((NUM_INPUTS, 7, 4), NUM_CLASSES)
        dtype = getattr(torch, self.experiment.dtype)
        start = self.model.init(torch.Generator().manual_seed(1), dtype)
        self.assembly = assemble(
            self.experiment,
            self.model,
            num_classes=NUM_CLASSES,
            input_size=NUM_INPUTS,
            method_class=method,
            initial=start,
        )
        self.method = self.assembly.method
        self.start = start
        self.works = []
        for number, size in enumerate(sizes):
            client = (clients or {}).get(number) or make_client(size, number)
            client = replace(client, inputs=client.inputs.to(dtype))
            # Parameters that are not shared differ from client to client.
            own = {
                name: value if self.method.shared(name) else value + 0.1 * number
                for name, value in start.items()
            }
            self.works.append(
                ClientTask(
                    client,
                    own,
                    self.method.init_client(own),
                    self.method.describe(client.labels),
                    1,
                )
            )
        pool = PrototypePool.empty(NUM_CLASSES, self.model.embedding_size, dtype=dtype)
        shared = {name: value for name, value in start.items() if self.method.shared(name)}
        self.received = self.method.prepare(Broadcast(1, shared, {}, pool))

    def by_loop(self) -> dict[str, TrainedClients]:
        """Return each client, trained by the loop."""
        trainer = LoopTrainer(self.assembly)
        return {each.names[0]: each for each in trainer.train(self.works, 1, self.received)}

    def by_factors(self) -> FactoredClients:
        """Return the clients, trained as factors of any size."""
        trainer = FactoredTrainer(self.assembly)
        trainer.layers = self.layers()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "mpfedcl.engines.trainers.factored.is_smaller_written_out", lambda _: False
            )
            (trained,) = trainer.train(self.works, 1, self.received)
        assert isinstance(trained, FactoredClients)
        return trained

    def by_direct(self) -> dict[str, TrainedClients]:
        """Return each client, trained without explicit gradients."""
        return {each.names[0]: each for each in self.direct().train(self.works, 1, self.received)}

    def direct(self) -> DirectTrainer:
        """Return the trainer without explicit gradients."""
        trainer = DirectTrainer(self.assembly)
        trainer.layers = self.layers()
        return trainer

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers that the loss consists of."""
        layers = find_layers(self.method, self.model, self.works[0], self.received)
        assert layers is not None
        return layers


def copy(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}
