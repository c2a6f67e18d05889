"""Clients in one stack: a diverged client does not affect the others; trained encoders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from situations import DOUBLE, RAGGED, build, double

from equivalent_runs import assert_close_tensors
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.models import Mlp
from mpfedcl.models.encoders.encoder import Preprocessing
from mpfedcl.models.encoders.torch_encoders import TrainableEncoder
from mpfedcl.models.resnet import ResNet18
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from small_experiments import HIDDEN

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("example_methods")]


# A diverged client


def spoil(data: FederatedData, victim: str, factor: float) -> FederatedData:
    """Return the data with the inputs of one client multiplied."""
    inputs = data.client(victim).inputs * factor
    clients = tuple(
        ClientData(c.name, inputs, c.labels, c.test) if c.name == victim else c
        for c in data.clients
    )
    return FederatedData(
        data.dataset,
        data.class_names,
        clients,
        data.test_inputs,
        data.test_labels,
        data.partition,
    )


def run_spoiled(
    experiment: Experiment, victim: str, factor: float
) -> tuple[RoundLoop, list[RoundRecord]]:
    data = spoil(load_federated_data(experiment), victim, factor)
    federation = build(experiment, data, Mlp((data.input_size, *HIDDEN), data.num_classes))
    return federation, [federation.run_round(evaluate=True) for _ in range(2)]


ASTRAY: dict[str, tuple[float, str, dict[str, Any]]] = {
    "NaN": (float("nan"), "loss is nan", {}),
    "explodes": (1e155, "loss is nan", {}),
    "leaves float64 in its only step": (1e200, "not finite", {"train__batch_size": 1000}),
    "goes too far": (1e5, "changed by", {"train__batch_size": 1000, "validation__max_norm": 100.0}),
}


@pytest.mark.parametrize("engine", ["stacked", "factored"])
@pytest.mark.parametrize("method", ["fedavg", "mp-fedcl", "fedper", "moon"])
@pytest.mark.parametrize("case", ASTRAY)
def test_diverged_client_does_not_affect_its_stack(
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    method: str,
    engine: str,
) -> None:
    factor, reason, changes = ASTRAY[case]
    # So that the change is validated, and not the loss.
    monkeypatch.setattr("mpfedcl.rounds.validation.LARGEST_LOSS", float("inf"))
    experiment = double(images, method, RAGGED | changes)
    victim = "client-5"
    wanted, theirs = run_spoiled(experiment.replace(engine="loop"), victim, factor)
    found, ours = run_spoiled(experiment.replace(engine=engine), victim, factor)
    for left, right in zip(ours, theirs, strict=True):
        assert list(right.clients.rejected) == [victim]
        assert reason in right.clients.rejected[victim]
        assert list(left.clients.rejected) == [victim]
        assert reason in left.clients.rejected[victim]
        assert left.accuracy == right.accuracy
        assert left.accuracy_per_client == right.accuracy_per_client
        assert left.loss == pytest.approx(right.loss, rel=DOUBLE)
    assert_close_tensors(found.state.server.params, wanted.state.server.params, DOUBLE)
    assert found.pool.names == wanted.pool.names
    if len(wanted.pool):
        torch.testing.assert_close(found.pool.vectors, wanted.pool.vectors, rtol=0, atol=DOUBLE)
    assert_close_tensors(found.engine.state(), wanted.engine.state(), DOUBLE)
    assert not any(key.split("/")[1] == victim for key in found.engine.state())


# The whole encoder


@pytest.mark.usefixtures("narrow_resnet")
def test_stacked_encoder_training_equals_the_loop() -> None:
    key = torch.Generator().manual_seed(3)
    size = 8
    pixels = torch.randint(0, 256, (9, 3 * size * size), generator=key).to(torch.uint8)
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1])
    parts = {"a": slice(0, 1), "b": slice(1, 5), "c": slice(5, 7)}
    everything = torch.arange(2)
    clients = tuple(
        ClientData(name, pixels[part], labels[part], everything) for name, part in parts.items()
    )
    data = FederatedData("noise", ("x", "y"), clients, pixels[7:], labels[7:], {})
    weights = ResNet18().init(torch.Generator().manual_seed(1), torch.float32)
    model = TrainableEncoder(weights, Preprocessing(size), 2)
    experiment = Experiment(method="mp-fedcl").replace(
        dtype="float64", train__batch_size=2, prototypes__per_class=2
    )
    federations = [
        build(experiment.replace(engine=engine), data, model) for engine in ("stacked", "loop")
    ]
    found, wanted = (each.run_round(evaluate=True) for each in federations)
    assert found.accuracy == wanted.accuracy
    assert found.clients == wanted.clients
    assert len(wanted.clients.answered) == 3
    assert found.loss == pytest.approx(wanted.loss, rel=DOUBLE)
    left, right = federations
    assert_close_tensors(left.state.server.params, right.state.server.params, DOUBLE)
    models = [dict(each.engine.personal_models(each.shared_parameters)) for each in federations]
    assert models[1].keys() == parts.keys()
    for name, params in models[1].items():
        assert_close_tensors(models[0][name], params, DOUBLE, name)
    torch.testing.assert_close(left.pool.vectors, right.pool.vectors, rtol=1e-8, atol=1e-12)
