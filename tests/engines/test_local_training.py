"""Local training by hand: the steps of SGD, the learning rate by round, batches, the mean loss."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, relu

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.models import Mlp
from small_experiments import assert_same_tensors, build_federation, small


class Watched(Method):
    """FedAvg that notes the labels of each batch and the number of steps."""

    batches: list[list[int]] = []  # noqa: RUF012  -- one list for the whole test
    steps: list[int] = []  # noqa: RUF012

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        self.batches.append(batch.labels.tolist())
        assert bool(batch.mask.all())
        return super().loss(params, batch, context)

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        self.steps.append(num_steps)
        return super().finish(params, context, num_steps)


@pytest.fixture(autouse=True)
def _nothing_watched_yet() -> None:
    Watched.batches.clear()
    Watched.steps.clear()


def one_client(images: Path, **changes: Any) -> Experiment:
    return small(
        images, "fedavg", clients=1, dtype="float64", partition__kind="iid", **changes
    ).resolved()


def loss_by_hand(params: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
    hidden = relu(linear(inputs, params["hidden.0.weight"], params["hidden.0.bias"]))
    hidden = relu(linear(hidden, params["hidden.1.weight"], params["hidden.1.bias"]))
    logits = linear(hidden, params["classifier.weight"], params["classifier.bias"])
    return cross_entropy(logits, labels)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_steps_of_two_rounds_match_a_hand_computation(images: Path, momentum: float) -> None:
    # A batch holds all samples, so each epoch is one step and the order does not matter.
    experiment = one_client(
        images, train__batch_size=100, train__epochs=3, train__lr=0.2, train__momentum=momentum
    )
    (client,) = load_federated_data(experiment).clients
    federation = build_federation(experiment)
    params = {name: value.clone() for name, value in federation.state.server.params.items()}
    for lr in (0.2, 0.2 * 0.95):
        velocity = {name: torch.zeros_like(value) for name, value in params.items()}
        losses = []
        for _ in range(3):
            gradients, loss = torch.func.grad_and_value(loss_by_hand)(
                params, client.inputs, client.labels
            )
            losses.append(float(loss))
            velocity = {name: momentum * velocity[name] + gradients[name] for name in params}
            params = {name: params[name] - lr * velocity[name] for name in params}
        record = federation.run_round(evaluate=False)
        assert record.loss == pytest.approx(sum(losses) / 3, rel=1e-10)
        for name, value in federation.state.server.params.items():
            torch.testing.assert_close(value, params[name], rtol=1e-9, atol=1e-12)


def test_every_image_is_in_one_batch_per_epoch(images: Path) -> None:
    experiment = one_client(images, train__batch_size=8, train__epochs=2)
    federation = build_federation(experiment, method_class=Watched)
    federation.run_round(evaluate=False)
    # 60 images: seven batches of 8 and one of 4, twice.
    assert [len(batch) for batch in Watched.batches] == ([8] * 7 + [4]) * 2
    # Before them, one call without steps determined which tensors are sent.
    assert Watched.steps == [1, 16]
    epochs = [sum(Watched.batches[first : first + 8], []) for first in (0, 8)]  # noqa: RUF017
    for epoch in epochs:
        assert [epoch.count(label) for label in range(3)] == [20, 20, 20]
    assert epochs[0] != epochs[1]


def test_mean_loss_is_over_images(images: Path) -> None:
    # With a learning rate of 0 each image has the same loss in any batch.
    losses = []
    for size in (7, 60):
        experiment = one_client(images, train__batch_size=size, train__lr=1e-300)
        losses.append(build_federation(experiment).run_round(evaluate=False).loss)
    assert losses[0] is not None
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_batches_depend_only_on_seed_round_and_client(images: Path) -> None:
    experiment = small(images, partition__kind="iid")
    federation = build_federation(experiment, method_class=Watched)
    for _ in range(2):
        federation.run_round(evaluate=False)
    first = [list(batch) for batch in Watched.batches]
    Watched.batches.clear()
    again = build_federation(experiment, method_class=Watched)
    for _ in range(2):
        again.run_round(evaluate=True)
    assert Watched.batches == first
    half = len(first) // 2
    assert first[:half] != first[half:]


def test_both_precisions_start_from_the_same_weights() -> None:
    model = Mlp((784, 512, 512, 256), 10)
    single, double = (
        model.init(torch.Generator().manual_seed(3), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert sum(value.numel() for value in single.values()) == 798_474
    assert model.embedding_size == 256
    assert_same_tensors(single, {name: value.float() for name, value in double.items()})
    for name, value in double.items():
        fan_in = double[name.replace("bias", "weight")].shape[1]
        assert float(value.abs().max()) <= 1 / math.sqrt(fan_in)
        assert float(value.abs().max()) > 0.8 / math.sqrt(fan_in)


def test_embedding_is_after_the_last_relu() -> None:
    model = Mlp((4, 8, 3), 2)
    params = model.init(torch.Generator().manual_seed(3), torch.float64)
    random = torch.Generator().manual_seed(4)
    inputs = torch.randn(50, 4, generator=random, dtype=torch.float64)
    embeddings, logits = model.apply(params, inputs)
    assert embeddings.shape == (50, 3)
    assert bool((embeddings >= 0).all())
    assert bool((embeddings == 0).any())
    wanted = linear(embeddings, params["classifier.weight"], params["classifier.bias"])
    assert torch.equal(logits, wanted)
