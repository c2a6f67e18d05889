"""FedBN: what travels, what stays, and a slow loop in torch's own layers as its oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.experiment import Experiment
from mpfedcl.methods import LayerNames
from mpfedcl.methods.fedbn import FedBN
from mpfedcl.methods.messages import Update
from mpfedcl.models.resnet import ResNet18
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import assemble_federation, assert_same_tensors, tensors_of

SIZE, HIDDEN = 12, 5


def settings(method: str, **changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "rounds": 2,
        "clients": 2,
        "dtype": "float64",
        "model__name": "cnn",
        "model__norm": "group",
        "model__hidden": (HIDDEN,),
        "dataset__train_size": 21,
        "dataset__image_size": SIZE,
        "partition__alpha": 1.0,
        "partition__min_size": 1,
        "train__batch_size": 8,
        "train__lr": 0.1,
    }
    return Experiment(method=method).replace(**values | changes).resolved()


def start(experiment: Experiment) -> tuple[RoundLoop, FederatedData]:
    data, model = load_data_and_model(experiment, torch.device("cpu"))
    return assemble_federation(experiment, data, model), data


def train_by_hand(
    params: Tensors, data: FederatedData, name: str, experiment: Experiment, round_number: int
) -> Tensors:
    """Train one client with modules of torch."""
    client, train = data.client(name), experiment.train
    network = nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (SIZE // 4) ** 2, HIDDEN), nn.ReLU()),
        nn.Linear(HIDDEN, data.num_classes),
    ).double()
    own = list(network.parameters())
    for value, given in zip(own, params.values(), strict=True):
        value.data.copy_(given)
    lr = train.lr * train.lr_decay ** (round_number - 1)
    velocities = [torch.zeros_like(value) for value in own]
    for chosen in draw_batches(client, experiment, round_number):
        images = client.inputs[chosen].reshape(-1, 1, SIZE, SIZE)
        loss: Tensor = nn.functional.cross_entropy(network(images), client.labels[chosen])
        slopes = torch.autograd.grad(loss, own)
        velocities = [train.momentum * v + g for v, g in zip(velocities, slopes, strict=True)]
        for value, velocity in zip(own, velocities, strict=True):
            value.data -= lr * velocity
    return dict(zip(params, (value.detach() for value in own), strict=True))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_two_rounds_match_a_plain_loop(engine: str) -> None:
    experiment = settings("fedbn", engine=engine)
    loop, data = start(experiment)
    shared = dict(loop.state.server.params)
    models = dict.fromkeys(data.names, shared)
    sizes = {client.name: len(client.labels) for client in data.clients}
    for round_number in (1, 2):
        for name in data.names:
            norms = {n: v for n, v in models[name].items() if n.startswith("norm.")}
            begun = {n: norms.get(n, v) for n, v in shared.items()}
            models[name] = train_by_hand(begun, data, name, experiment, round_number)
        shared = {
            n: sum((sizes[c] * models[c][n] for c in data.names), torch.zeros(())) / 21
            for n in shared
        }
        loop.run_round(evaluate=False)
    found = loop.state.server.params
    for name in (n for n in shared if not n.startswith("norm.")):
        assert torch.allclose(found[name], shared[name], rtol=1e-9, atol=1e-12), name
    for client in data.names:
        for name in (n for n in shared if n.startswith("norm.")):
            kept = loop.engine.state()[f"kept/{client}/{name}"]
            assert torch.allclose(kept, models[client][name], rtol=1e-9, atol=1e-12), name


def test_normalization_layers_are_trained_but_never_sent() -> None:
    loop, data = start(settings("fedbn"))
    before = dict(loop.state.server.params)
    broadcast = loop.broadcast()
    assert not any(name.startswith("norm") for name in broadcast.params)
    updates = list(loop.engine.train(broadcast, data.names, keep=data.names))
    assert len(updates) == 2
    for update in updates:
        assert isinstance(update, Update)
        assert set(tensors_of(update)) == {n for n in before if not n.startswith("norm")}
    loop.engine.keep(data.names, loop.broadcast)
    state = loop.engine.state()
    assert len(state) == 2 * 4
    first, second = (state[f"kept/{name}/norm.0.weight"] for name in data.names)
    assert not torch.equal(first, second)
    assert not torch.equal(first, before["norm.0.weight"])


def run_rounds(experiment: Experiment) -> Tensors:
    loop, _ = start(experiment)
    for _ in range(2):
        loop.run_round(evaluate=False)
    return {n: v for n, v in loop.state.server.params.items() if not n.startswith("norm.")}


def test_single_client_equals_fedavg_and_two_differ() -> None:
    # Sixteen times a number, divided by sixteen, is the number: no rounding in FedAvg's mean.
    alone = {"clients": 1, "dataset__train_size": 16}
    assert_same_tensors(
        run_rounds(settings("fedbn", **alone)), run_rounds(settings("fedavg", **alone))
    )
    two, averaged = run_rounds(settings("fedbn")), run_rounds(settings("fedavg"))
    assert not torch.equal(two["conv.0.weight"], averaged["conv.0.weight"])


def test_trained_resnet_keeps_normalization_layers_on_the_client() -> None:
    method = FedBN(settings("fedavg", model__norm="none").replace(encoder__train=True), 3)
    kept = {f"encoder.{name}" for name in ResNet18().normalization()}
    method.layers = LayerNames(normalization=frozenset(kept))
    assert not method.shared("encoder.layer2.0.downsample.1.bias")
    assert not method.shared("encoder.bn1.weight")
    assert method.shared("encoder.layer2.0.downsample.0.weight")
    assert method.shared("hidden.0.weight")


def test_model_without_normalization_is_rejected() -> None:
    for changes in ({"model__norm": "none"}, {"model__norm": "none", "model__name": "mlp"}):
        with pytest.raises(InvalidInput, match="without normalization layers, which fedbn keeps"):
            FedBN(settings("fedavg", **changes), 3)
