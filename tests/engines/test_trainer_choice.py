"""Which trainer a client gets."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_methods import Clipped, Decay
from tasks import NUM_CLASSES, NUM_INPUTS, Task, draw, make_client
from torch import Tensor

from mpfedcl import Experiment, InvalidInput, run
from mpfedcl.engines.factored import TrainedFactors
from mpfedcl.engines.trained_clients import TrainedClient, TrainedClients, TrainedStack
from mpfedcl.engines.trainer_choice import MOST_ROWS, SMALL_MODEL, TrainerChoice
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.models import Cnn, Mlp
from mpfedcl.runs.observer import Observer
from mpfedcl.tensors import Tensors
from small_experiments import assert_same_tensors, build_federation, small

KINDS = {TrainedClient: "loop", TrainedStack: "stacked", TrainedFactors: "factored"}


@pytest.fixture(autouse=True)
def _never_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfedcl.engines.factored.WRITTEN_OUT_FROM", 10**9)


def choose(
    sizes: Sequence[int], *, method: type[Method] = Method, hidden: int = 7, **changes: Any
) -> list[str]:
    """Return by client, in order of name, how it was trained."""
    model = Mlp((NUM_INPUTS, hidden), NUM_CLASSES)
    task = Task(sizes, method=method, model=model, **changes)
    choice = TrainerChoice(task.assembly)
    groups: list[TrainedClients] = choice.train(task.works, 1, task.received)
    kinds = {name: KINDS[type(group)] for group in groups for name in group.names}
    assert sum(len(group.names) for group in groups) == len(sizes)
    return [kinds[work.client.name] for work in task.works]


@pytest.mark.parametrize("method", [Method, Decay, Clipped])
def test_the_loop_is_the_loop(method: type[Method]) -> None:
    assert choose([1, 5, 300], method=method, engine="loop") == ["loop"] * 3


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_clients_with_few_samples_are_rows(engine: str) -> None:
    assert choose([1, 5, 30], engine=engine) == ["factored"] * 3
    assert choose([2], engine=engine) == ["factored"]


@pytest.mark.parametrize("epochs", [1, 2])
def test_samples_times_epochs_decide(epochs: int) -> None:
    limit = MOST_ROWS // epochs
    changes: dict[str, Any] = {
        "engine": "stacked",
        "train__epochs": epochs,
        "train__batch_size": 64,
    }
    found = choose([limit, limit + 1, 3, limit + 2], **changes)
    assert found == ["factored", "stacked", "factored", "stacked"]


def test_auto_runs_a_few_large_clients_one_by_one() -> None:
    large = MOST_ROWS + 1
    changes: dict[str, Any] = {"engine": "auto", "train__batch_size": 64}
    assert choose([large, 2, large, large], **changes) == ["loop", "factored", "loop", "loop"]
    assert choose([large, 2, *[large] * 3], **changes) == ["stacked", "factored", *["stacked"] * 3]


def test_auto_asks_for_company() -> None:
    changes: dict[str, Any] = {"engine": "auto", "train__batch_size": 64}
    assert choose([200, 2], **changes) == ["loop", "factored"]
    assert choose([200, 2, 3], **changes) == ["factored"] * 3


@pytest.mark.parametrize("method", [Decay, Clipped])
def test_methods_beyond_linear_layers_are_never_rows(method: type[Method]) -> None:
    assert choose([1, 5, 30, 2], method=method, engine="stacked") == ["stacked"] * 4
    assert choose([1, 5, 30, 2], method=method, engine="auto") == ["stacked"] * 4
    assert choose([1, 5, 30], method=method, engine="auto") == ["loop"] * 3
    assert choose([1, 5, 30], method=method, engine="stacked") == ["stacked"] * 3


def test_auto_stacks_small_models_only() -> None:
    per_unit = NUM_INPUTS + 1 + NUM_CLASSES
    largest = (SMALL_MODEL - NUM_CLASSES) // per_unit
    changes: dict[str, Any] = {"engine": "auto", "train__batch_size": 100}
    assert choose([2] * 4, method=Clipped, hidden=largest, **changes) == ["stacked"] * 4
    assert choose([2] * 4, method=Clipped, hidden=largest + 1, **changes) == ["loop"] * 4


def test_convolutions_run_one_client_after_the_other_unless_a_stack_is_asked_for() -> None:
    images = {
        number: replace(make_client(3, number), inputs=draw(number, 3, 16)) for number in range(4)
    }
    for engine, wanted in (("auto", "loop"), ("stacked", "stacked"), ("loop", "loop")):
        task = Task([3] * 4, model=Cnn((4, 4), NUM_CLASSES, (2,)), clients=images, engine=engine)
        groups = TrainerChoice(task.assembly).train(task.works, 1, task.received)
        assert {KINDS[type(group)] for group in groups} == {wanted}


class LooksAtValues(FedAvg):
    """A loss that branches on a value, which no batched trainer can run."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(params, batch, context)
        return loss * 2 if float(loss.detach()) > 0 else loss


def test_what_cannot_be_batched_is_looped(images: Path) -> None:
    experiment = small(images, clients=5)
    found = {}
    for engine in ("auto", "loop"):
        federation = build_federation(experiment.replace(engine=engine), method_class=LooksAtValues)
        federation.run_round(evaluate=False)
        found[engine] = federation.state.server.params
    assert_same_tensors(found["auto"], found["loop"])


def test_what_cannot_be_batched_is_said_where_it_was_asked_for(images: Path) -> None:
    federation = build_federation(
        small(images, clients=5, engine="stacked"), method_class=LooksAtValues
    )
    with pytest.raises(RuntimeError, match="vmap"):
        federation.run_round(evaluate=False)


def own_method(images: Path, engine: str) -> Experiment:
    method = f"{__name__}:LooksAtValues"
    return small(images, method, clients=5, engine=engine, rounds=2, model__hidden=(4,))


def test_somebodys_own_method_that_cannot_be_batched_is_told_where_to_read(
    images: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        run(own_method(images, "stacked"), tmp_path / "run")
    sentence = str(refusal.value)
    assert sentence.startswith(f"method is '{__name__}:LooksAtValues', which cannot train many")
    assert "CONTRIBUTING.md" in sentence
    assert "--engine loop" in sentence
    assert "\n" not in sentence


def test_it_trains_all_the_same_and_says_once_that_it_is_slow(images: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    run(own_method(images, "auto"), tmp_path / "run", Observer(on_warning=warnings.append))
    (warning,) = warnings
    assert warning.startswith("Clients are trained one after the other")
    assert "CONTRIBUTING.md" in warning


class Stumbles(Method):
    """Runs out of memory wherever several clients are trained at once."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(batch.inputs):
            raise torch.OutOfMemoryError("no room for\n  a stack")
        return super().loss(params, batch, context)


def test_a_fall_back_to_a_slower_way_is_told_with_its_reason() -> None:
    task = Task([4] * 8, method=Stumbles)
    choice = TrainerChoice(task.assembly)
    choice.begin_round()
    choice.train(task.works, 1, task.received)
    told = choice.describe_round()
    assert told["loop"] == 8
    assert set(told) == {"loop", "fallback"}
    assert told["fallback"] == [
        f"{name}: OutOfMemoryError: no room for a stack" for name in ("factored", "stacked")
    ]
    # In later rounds it is still said why.
    choice.begin_round()
    choice.train(task.works[:2], 2, task.received)
    assert choice.describe_round() == {"loop": 2, "fallback": told["fallback"]}


def test_how_clients_were_trained_is_told() -> None:
    task = Task([4, 4, 4, 4, 600])
    choice = TrainerChoice(task.assembly)
    choice.begin_round()
    choice.train(task.works, 1, task.received)
    assert choice.describe_round() == {"factored": 4, "loop": 1}
