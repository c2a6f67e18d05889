"""Clients made for measuring: data in memory, a model, and federations that need no files."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from mpfedcl.core.rng import generator
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines import DispatchingEngine, InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, find_method
from mpfedcl.models import Mlp
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.loop import RoundLoop, make_loop
from mpfedcl.rounds.systems import SystemModel

NUM_CLASSES = 10
MNIST_SIZES = (784, 512, 512, 256)
HEAD_SIZES = (512, 256)


@dataclass(frozen=True)
class Workload:
    """Clients with their data and the model that they train."""

    name: str
    data: FederatedData
    sizes: tuple[int, ...]
    """The model's layers without the classifier."""

    def federation(self, method: str = "mp-fedcl", **changes: Any) -> RoundLoop:
        """Return a federation before its first round; changes are settings of the experiment."""
        found = find_method(method)
        experiment = Experiment(method=method).replace(**changes).resolved(found.defaults)
        assembly = assemble(
            experiment,
            Mlp(self.sizes, NUM_CLASSES),
            num_classes=NUM_CLASSES,
            input_size=self.sizes[0],
            public=(self.data.test_inputs, self.data.test_labels)
            if experiment.public.size
            else None,
        )
        is_asynchronous = isinstance(assembly.method, Asynchronous)
        kind = DispatchingEngine if is_asynchronous else InProcessEngine
        counts = dict(zip(self.data.names, self.data.label_counts().tolist(), strict=True))
        return make_loop(assembly, kind(assembly, self.data), SystemModel.of(assembly, counts))

    @property
    def num_samples(self) -> int:
        """Training samples of all clients."""
        return sum(len(client.labels) for client in self.data.clients)

    @property
    def training_flops(self) -> int:
        """Flops of an epoch's products: forward, gradients of weights and of all but the inputs."""
        layers = [fan_in * fan_out for fan_in, fan_out in pairwise((*self.sizes, NUM_CLASSES))]
        return 2 * self.num_samples * (3 * sum(layers) - layers[0])

    @property
    def embedding_flops(self) -> int:
        """Flops of the pass that embeds the training data for clustering."""
        return 2 * self.num_samples * sum(a * b for a, b in pairwise(self.sizes))


def mnist_clients(num_clients: int, num_images: int, num_test: int = 1000) -> Workload:
    """Return clients with digits of two or three classes each and the paper's MNIST model.

    The digits are those inside the package, used again where more are asked for.
    """
    packed = (resources.files("mpfedcl.data") / "mnist_sample.npz").read_bytes()
    with numpy.load(io.BytesIO(packed)) as arrays:
        images, labels = _scale(arrays["x_train"]), torch.from_numpy(arrays["y_train"]).long()
        test = _scale(arrays["x_test"]), torch.from_numpy(arrays["y_test"]).long()
    by_class = [(labels == number).nonzero().squeeze(1) for number in range(NUM_CLASSES)]
    used = [0] * NUM_CLASSES

    def take(wanted: Tensor) -> Tensor:
        rows = []
        for number in wanted.tolist():
            rows.append(by_class[number][used[number] % len(by_class[number])])
            used[number] += 1
        return images[torch.stack(rows)]

    data = _deal(num_clients, num_images, take, (test[0][:num_test], test[1][:num_test]))
    return Workload(f"MNIST model, {num_clients:,} x {num_images}", data, MNIST_SIZES)


def head_clients(num_clients: int, num_images: int, num_test: int = 1000) -> Workload:
    """Return clients with made-up features, a cluster a class, and the head of frozen encoders."""
    key = generator(0, "features")
    centres = torch.randn(NUM_CLASSES, HEAD_SIZES[0], generator=key)

    def take(wanted: Tensor) -> Tensor:
        noise = torch.randn(len(wanted), HEAD_SIZES[0], generator=key)
        # Features of an encoder with a ReLU at its end are never below 0.
        return (centres[wanted] + 2 * noise).relu_()

    labels = torch.arange(num_test) % NUM_CLASSES
    data = _deal(num_clients, num_images, take, (take(labels), labels))
    return Workload(f"head, {num_clients:,} x {num_images}", data, HEAD_SIZES)


def _scale(images: Any) -> Tensor:
    pixels = torch.from_numpy(images).flatten(1).float().div_(255)
    return pixels.sub_(0.1307).div_(0.3081)


def _deal(
    num_clients: int,
    num_images: int,
    take: Callable[[Tensor], Tensor],
    test: tuple[Tensor, Tensor],
) -> FederatedData:
    """Give every client two or three classes, as many images of each."""
    everything = torch.arange(len(test[1]))
    clients = []
    for number in range(num_clients):
        order = torch.randperm(NUM_CLASSES, generator=generator(0, number, "classes"))
        classes = order[: 2 + number % 2]
        labels = classes[torch.arange(num_images) % len(classes)]
        name = f"client-{number:05d}"
        clients.append(ClientData(name, take(labels), labels, everything))
    names = tuple(str(number) for number in range(NUM_CLASSES))
    return FederatedData(
        "made for measuring", names, tuple(clients), *test, partition={}, public=test
    )
