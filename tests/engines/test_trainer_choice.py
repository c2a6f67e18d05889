"""Choice of the trainer for each client."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_methods import Clipped, Decay
from tasks import NUM_CLASSES, NUM_INPUTS, Task, draw, make_client
from torch import Tensor

from equivalent_runs import assert_close_tensors
from mpfedcl import Experiment, InvalidInput, run
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers import MOST_ROWS, TrainerChoice
from mpfedcl.engines.trainers.base import TrainedClients
from mpfedcl.engines.trainers.direct import DirectTrainer
from mpfedcl.engines.trainers.factored import FactoredTrainer
from mpfedcl.engines.trainers.loop import LoopTrainer
from mpfedcl.engines.trainers.stacked import StackedTrainer
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.models import Cnn, Mlp
from mpfedcl.runs.observer import Observer
from small_experiments import build_federation, small


def choose(
    sizes: Sequence[int], *, method: type[Method] = Method, hidden: int = 7, **changes: Any
) -> list[str]:
    """Return the trainer of each client, in order of name."""
    model = Mlp((NUM_INPUTS, hidden), NUM_CLASSES)
    return watch(Task(sizes, method=method, model=model, **changes))


def watch(task: Task) -> list[str]:
    """Return the trainer of each client, and check the counts in the records."""
    choice, found = TrainerChoice(task.assembly), {}
    choice.begin_round()
    with pytest.MonkeyPatch.context() as patch:
        for trainer in (LoopTrainer, DirectTrainer, StackedTrainer, FactoredTrainer):

            def train(
                self: Any,
                tasks: Any,
                *rest: Any,
                train: Any = trainer.train,
                name: str = trainer.name,
            ) -> Any:
                found.update({task.client.name: name for task in tasks})
                return train(self, tasks, *rest)

            patch.setattr(trainer, "train", train)
        groups: list[TrainedClients] = choice.train(task.works, 1, task.received)
    assert sum(len(group.names) for group in groups) == len(task.works)
    assert choice.describe_round() == Counter(found.values())
    return [found[work.client.name] for work in task.works]


@pytest.mark.parametrize("method", [Method, Decay, Clipped])
def test_engine_loop_uses_only_the_loop(method: type[Method]) -> None:
    assert choose([1, 5, 300], method=method, engine="loop") == ["loop"] * 3


def test_named_trainer_has_all_clients() -> None:
    assert choose([1, 5, 300], engine="factored") == ["factored"] * 3
    assert choose([1, 5, 300], engine="stacked") == ["stacked"] * 3


@pytest.mark.parametrize("epochs", [1, 2])
def test_auto_factors_clients_of_few_rows(epochs: int) -> None:
    limit = MOST_ROWS // epochs
    found = choose([limit, limit + 1, 3, 5, limit, limit + 2], train__epochs=epochs)
    assert found == ["factored", "direct", "factored", "factored", "factored", "direct"]


def test_auto_trains_few_clients_one_by_one() -> None:
    assert choose([300]) == ["direct"]
    assert choose([5] * 3) == ["direct"] * 3
    assert choose([5] * 3 + [300]) == ["direct"] * 4
    assert choose([5] * 4) == ["factored"] * 4


def test_decaying_weights_and_parts_of_models_are_never_factored() -> None:
    assert choose([30] * 8, train__weight_decay=0.1) == ["direct"] * 8
    assert choose([30] * 8, engine="factored", train__weight_decay=0.1) == ["stacked"] * 8
    task = Task([30] * 8)
    task.works = [replace(work, is_part=True) for work in task.works]
    assert watch(task) == ["direct"] * 8


@pytest.mark.parametrize("method", [Decay, Clipped])
def test_methods_beyond_linear_layers_are_never_factored(method: type[Method]) -> None:
    assert choose([1, 5, 30], method=method, engine="factored") == ["stacked"] * 3
    assert choose([30] * 8, method=method) == ["stacked"] * 8
    assert choose([30] * 3, method=method) == ["loop"] * 3


def test_auto_stacks_small_models_only() -> None:
    assert choose([30] * 8, method=Clipped, hidden=100) == ["stacked"] * 8
    assert choose([30] * 8, method=Clipped, hidden=20_000) == ["loop"] * 8


def test_convolutions_use_the_loop_unless_stacked_is_asked_for() -> None:
    images = {
        number: replace(make_client(3, number), inputs=draw(number, 3, 16)) for number in range(4)
    }
    for engine, wanted in (("auto", "loop"), ("stacked", "stacked"), ("loop", "loop")):
        task = Task([3] * 4, model=Cnn((4, 4), NUM_CLASSES, (2,)), clients=images, engine=engine)
        assert set(watch(task)) == {wanted}


class LooksAtValues(FedAvg):
    """Has a loss that branches on a value, which no batched trainer can run."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(params, batch, context)
        return loss * 2 if float(loss.detach()) > 0 else loss


def test_loss_that_vmap_cannot_run_trains_client_by_client(images: Path) -> None:
    experiment = small(images, clients=5)
    found = {}
    for engine in ("auto", "loop"):
        federation = build_federation(experiment.replace(engine=engine), method_class=LooksAtValues)
        federation.run_round(evaluate=False)
        found[engine] = federation.state.server.params
    assert_close_tensors(found["auto"], found["loop"], 1e-5)


def test_loss_that_vmap_cannot_run_is_an_error_with_engine_stacked(images: Path) -> None:
    federation = build_federation(
        small(images, clients=5, engine="stacked"), method_class=LooksAtValues
    )
    with pytest.raises(RuntimeError, match="vmap"):
        federation.run_round(evaluate=False)


def own_method(images: Path, engine: str) -> Experiment:
    method = f"{__name__}:LooksAtValues"
    return small(images, method, clients=5, engine=engine, rounds=2, model__hidden=(4,))


def test_user_method_that_vmap_cannot_run_is_rejected_in_one_line(
    images: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        run(own_method(images, "stacked"), tmp_path / "run")
    sentence = str(refusal.value)
    assert sentence.startswith(f"method is '{__name__}:LooksAtValues', which cannot train many")
    assert "CONTRIBUTING.md" in sentence
    assert "--engine loop" in sentence
    assert "\n" not in sentence


def test_run_warns_once_about_client_by_client_training(images: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    run(own_method(images, "auto"), tmp_path / "run", Observer(on_warning=warnings.append))
    (warning,) = warnings
    assert warning.startswith("Clients are trained one after the other")
    assert "CONTRIBUTING.md" in warning


class Stumbles(Method):
    """Runs out of memory if several clients are trained at once."""

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(batch.inputs):
            raise torch.OutOfMemoryError("no room for\n  a stack")
        return super().loss(params, batch, context)


def test_fallback_is_recorded_with_its_reason() -> None:
    task = Task([40] * 8, method=Stumbles)
    choice = TrainerChoice(task.assembly)
    choice.begin_round()
    choice.train(task.works, 1, task.received)
    reported = choice.describe_round()
    reason = "factored: OutOfMemoryError: no room for a stack"
    assert reported == {"direct": 8, "fallback": [reason]}
    # Later rounds still record the reason.
    choice.begin_round()
    choice.train(task.works[:2], 2, task.received)
    assert choice.describe_round() == reported | {"direct": 2}


def test_trainers_are_recorded() -> None:
    task = Task([400, 40, 40, 40, 40])
    choice = TrainerChoice(task.assembly)
    choice.begin_round()
    choice.train(task.works, 1, task.received)
    assert choice.describe_round() == {"direct": 1, "factored": 4}
