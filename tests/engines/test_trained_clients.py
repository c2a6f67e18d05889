"""Groups of trained clients: each result against plain loops over clients."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from tasks import NUM_INPUTS, Task, draw, make_client
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import TrainedStack
from mpfedcl.engines.trainers.factored import FactoredClients
from mpfedcl.methods.fedper import FedPer
from mpfedcl.methods.messages import StackMember

Array = NDArray[numpy.float64]
SIZES = (6, 1, 11, 3)
SPOILED = 2


def stack(task: Task, *, spoiled: int | None = None) -> TrainedStack:
    """Return the task's clients with random models as a stack."""
    params = {
        name: torch.stack([work.start[name] for work in task.works])
        + 0.3 * draw(number, len(task.works), *task.start[name].shape)
        for number, name in enumerate(task.start)
    }
    if spoiled is not None:
        params["hidden.0.weight"][spoiled, 1, 2] = math.nan
        params["classifier.bias"][spoiled, 0] = math.inf
    return TrainedStack(
        [work.client for work in task.works],
        task.model,
        params,
        starts=[{n: v for n, v in task.start.items() if task.method.shared(n)}] * len(task.works),
        states=[{}] * len(task.works),
        losses=[0.5, 1.5, 2.5, 3.5],
    )


def factors(task: Task, *, spoiled: int | None = None) -> FactoredClients:
    """Return the task's clients as rows and slopes, after a round of training."""
    if spoiled is not None:
        client = make_client(SIZES[spoiled], spoiled)
        client.inputs[0, 1] = math.nan
        task = Task(SIZES, method=type(task.method), clients={spoiled: client}, **MOMENTUM)
    return task.by_factors()


MOMENTUM: dict[str, Any] = {"train__momentum": 0.6, "train__epochs": 2}
Make = Callable[..., TrainedStack | FactoredClients]
BOTH = pytest.mark.parametrize("make", [stack, factors])


@pytest.fixture(params=["all", "part"])
def task(request: pytest.FixtureRequest) -> Task:
    """Return a task that shares the whole model, or all but the classifier."""
    if request.param == "all":
        return Task(SIZES, **MOMENTUM)
    return Task(SIZES, method=FedPer, **MOMENTUM)


def models(trained: TrainedStack | FactoredClients) -> list[dict[str, Array]]:
    found = [trained.params(index) for index in range(len(trained))]
    return [{name: value.numpy() for name, value in params.items()} for params in found]


def run_by_hand(params: dict[str, Array], inputs: Array) -> tuple[Array, Array]:
    hidden = inputs
    for name in ("hidden.0", "hidden.1"):
        hidden = numpy.maximum(hidden @ params[f"{name}.weight"].T + params[f"{name}.bias"], 0)
    return hidden, hidden @ params["classifier.weight"].T + params["classifier.bias"]


def is_close(found: Tensor, wanted: Array) -> bool:
    return bool(numpy.allclose(found.numpy(), wanted, rtol=1e-10, atol=1e-12))


@BOTH
def test_total_is_the_weighted_sum(task: Task, make: Make) -> None:
    trained = make(task)
    for weights in ([3.0, 1.0, 2.0, 5.0], [0.0, 4.0, 0.0, 1.0], [0.0, 0.0, 7.0, 0.0]):
        totals = trained.weighted_sum(torch.tensor(weights, dtype=torch.float64))
        assert sorted(totals) == sorted(n for n in task.start if task.method.shared(n))
        for name, total in totals.items():
            wanted = numpy.zeros(total.shape)
            for weight, params in zip(weights, models(trained), strict=True):
                wanted += weight * params[name]
            assert is_close(total, wanted), name


@BOTH
def test_squared_changes_are_of_shared_parameters_from_the_start(task: Task, make: Make) -> None:
    trained = make(task)
    assert len(trained.squared_changes) == len(SIZES)
    for found, params in zip(trained.squared_changes, models(trained), strict=True):
        wanted = 0.0
        for name, start in task.start.items():
            if task.method.shared(name):
                wanted += float(((params[name] - start.numpy()) ** 2).sum())
        assert wanted > 1e-5
        assert found == pytest.approx(wanted, rel=1e-9)


def test_squared_changes_use_each_clients_own_start() -> None:
    clients = Task(SIZES[:2]).works
    starts = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([10.0, 20.0])}]
    trained = TrainedStack(
        [work.client for work in clients],
        Task(SIZES[:2]).model,
        {"w": torch.tensor([[1.0, 5.0], [14.0, 20.0]])},
        starts=starts,
        states=[{}, {}],
        losses=[0.0, 0.0],
    )
    assert trained.squared_changes == [9, 16]


@BOTH
def test_shared_tensors_are_part_of_the_model(task: Task, make: Make) -> None:
    trained = make(task)
    assert len(trained) == len(SIZES)
    for index, params in enumerate(models(trained)):
        assert params.keys() == task.start.keys()
        share = trained.averaged(index)
        assert isinstance(share, StackMember)
        shared = share.stack.tensors(share.index)
        assert sorted(shared) == sorted(n for n in task.start if task.method.shared(n))
        for name, value in shared.items():
            assert is_close(value, params[name])
            assert share.stack.template[name].shape == value.shape
            assert share.stack.template[name].dtype == value.dtype


def test_model_from_a_stack_is_a_copy(task: Task) -> None:
    trained = stack(task)
    before = models(trained)
    trained.params(1)["hidden.0.bias"].zero_()
    for left, right in zip(models(trained), before, strict=True):
        assert numpy.array_equal(left["hidden.0.bias"], right["hidden.0.bias"])


@BOTH
def test_predictions_of_some_clients_equal_a_loop(task: Task, make: Make) -> None:
    trained, inputs = make(task), draw(50, 9, NUM_INPUTS)
    written = models(trained)
    for some in ((0, 1, 2, 3), (1, 2), (3,), (0, 2)):
        embeddings, logits = trained.predict(some, inputs)
        assert embeddings.shape[:2] == logits.shape[:2] == (len(some), 9)
        for place, params in enumerate(written[number] for number in some):
            wanted = run_by_hand(params, inputs.numpy())
            assert is_close(embeddings[place], wanted[0])
            assert is_close(logits[place], wanted[1])


@BOTH
def test_embeddings_of_the_local_samples_keep_their_order(task: Task, make: Make) -> None:
    trained = make(task)
    clients = {work.client.name: work.client for work in task.works}
    embeddings = dict(zip(trained.names, trained.embed(), strict=True))
    assert embeddings.keys() == clients.keys()
    for index, name in enumerate(trained.names):
        wanted, _ = run_by_hand(models(trained)[index], clients[name].inputs.numpy())
        assert embeddings[name].shape == wanted.shape
        assert is_close(embeddings[name], wanted)


def test_rows_and_slopes_equal_the_models_of_the_loop(task: Task) -> None:
    trained, wanted = factors(task), task.by_loop()
    for index, name in enumerate(trained.names):
        assert trained.losses[index] == pytest.approx(wanted[name].losses[0], rel=1e-12)
        for key, value in wanted[name].params(0).items():
            torch.testing.assert_close(trained.params(index)[key], value, rtol=1e-11, atol=1e-13)


def test_written_out_models_equal_the_factors(task: Task) -> None:
    trained = factors(task)
    written = trained.to_stack()
    assert isinstance(written, TrainedStack)
    assert written.names == trained.names
    assert written.losses == trained.losses
    assert written.squared_changes == pytest.approx(trained.squared_changes, rel=1e-9)
    for index in range(len(trained)):
        for name, value in trained.params(index).items():
            torch.testing.assert_close(written.params(index)[name], value, rtol=0, atol=1e-14)
    weights = torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=torch.float64)
    for name, value in trained.weighted_sum(weights).items():
        torch.testing.assert_close(
            written.weighted_sum(weights)[name], value, rtol=1e-12, atol=1e-13
        )


@BOTH
def test_nan_of_a_client_with_weight_zero_is_ignored(task: Task, make: Make) -> None:
    sound, trained = make(task), make(task, spoiled=SPOILED)
    assert trained.names == sound.names
    place = list(trained.names).index(f"client-{SPOILED}")
    weights = torch.tensor([3.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    weights[place] = 0
    assert not _is_finite(trained.tensors(place))
    for name, wanted in sound.weighted_sum(weights).items():
        torch.testing.assert_close(
            trained.weighted_sum(weights)[name], wanted, rtol=1e-12, atol=1e-13
        )
    changes = trained.squared_changes
    assert not math.isfinite(changes[place])
    for index in range(len(trained)):
        if index != place:
            assert changes[index] == pytest.approx(sound.squared_changes[index], rel=1e-9)
            assert _is_finite(trained.tensors(index))


@BOTH
def test_nan_of_a_counted_client_shows_in_the_sum(task: Task, make: Make) -> None:
    totals = make(task, spoiled=SPOILED).weighted_sum(torch.ones(len(SIZES), dtype=torch.float64))
    assert not _is_finite(totals)


def _is_finite(tensors: Tensors) -> bool:
    return all(bool(value.isfinite().all()) for value in tensors.values())
