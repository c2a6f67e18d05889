"""`check_method` accepts sound methods, and names the check that a wrong one fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import (
    Batch,
    Broadcast,
    Context,
    Method,
    Server,
    Tally,
    built_in_methods,
    check_method,
    find_method,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLE = ["fedavg", "fedprox", "mp-fedcl", "ditto", "fedrep", "fedgauss", "fed-dropout", "fedasync"]


@pytest.mark.parametrize("name", SAMPLE)
def test_built_in_method_passes(name: str) -> None:
    check_method(built_in_methods()[name])


def test_example_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    check_method(find_method("custom_method:Scaffold"))


class Sound(Method):
    name, summary = "sound", "passes"


class Nameless(Method):
    summary = "has no name"


class PredictsByTea(Method):
    name, summary = "tea", "predicts by something unknown"
    primary_predictor = "tea_leaves"  # type: ignore[assignment]


class TakesTheMeanOfAllRows(Sound):
    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        return cross_entropy(context.apply(params, batch.inputs)[1], batch.labels)


class Branches(Sound):
    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(params, batch, context)
        return loss if loss > 0 else -loss


class FollowsEngine(Sound):
    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        is_stack = torch._C._functorch.is_functorch_wrapped_tensor(batch.inputs)
        loss = super().loss(params, batch, context)
        return loss + (0.1 * params["classifier.bias"].square().sum() if is_stack else 0)


class Forgets(Sound):
    """Keeps a count in the object, where no checkpoint finds it."""

    rounds = 0

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        self.rounds += 1
        moved = {name: server.params[name].lerp(v, 1 / self.rounds) for name, v in means.items()}
        return super().reduce(server, moved, tally)


class KeepsList(Sound):
    def init_server(self, params: Tensors) -> Server:
        return Server(params, private={"rounds": []})  # type: ignore[dict-item]


class SendsNothing(Sound):
    def finish(self, params: Tensors, context: Context, num_steps: int) -> Any:
        return None, {}


class Breaks(Sound):
    def prepare(self, broadcast: Broadcast) -> Any:
        raise KeyError("no such tensor")


WRONG = {
    Nameless: "identity.*name is ''",
    PredictsByTea: "identity.*primary_predictor is 'tea_leaves'",
    Branches: "engines.*vmap",
    FollowsEngine: "engines.*differs",
    Forgets: "checkpoint.*server.params .* differs",
    KeepsList: "identity.*whose private is a dictionary in which rounds is a value of type list",
    SendsNothing: "checkpoint.*rejected in round 1.*withholds",
    Breaks: "KeyError.*no such tensor",
}


@pytest.mark.parametrize("method", [Sound, TakesTheMeanOfAllRows])
def test_sound_method_passes(method: type[Method]) -> None:
    check_method(method)


@pytest.mark.parametrize("method", WRONG, ids=lambda method: method.__name__)
def test_wrong_method_fails_by_name(method: type[Method]) -> None:
    with pytest.raises(InvalidInput, match=rf"method is '{method.__name__}'.*{WRONG[method]}"):
        check_method(method)


def test_class_of_another_kind_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="subclass of"):
        check_method(dict)  # type: ignore[arg-type]
