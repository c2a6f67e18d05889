"""A trained model as a module: its weights, its logits, and further training."""

import pytest
import torch
from torch import nn

from mpfedcl.core.rng import generator
from mpfedcl.models import Mlp
from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.factory import as_module

MODELS = {
    "mlp": (Mlp((5, 7, 4), 3), (6, 5)),
    "cnn": (Cnn((12, 12), 3, (8,), has_norm=True), (6, 144)),
}


@pytest.mark.parametrize("name", MODELS)
def test_module_returns_the_logits_of_the_model(name: str) -> None:
    model, shape = MODELS[name]
    params = model.init(generator(0, "weights"), torch.float32)
    inputs = torch.randn(shape, generator=generator(0, "inputs"))
    module = as_module(model, params)
    assert torch.equal(module(inputs), model.apply(params, inputs)[1])
    state = module.state_dict()
    assert state.keys() == params.keys()
    assert all(torch.equal(state[each], params[each]) for each in params)
    assert not module.training


def test_module_of_an_mlp_equals_the_layers_of_torch() -> None:
    model: Model = Mlp((5, 7, 4), 3)
    params = model.init(generator(0, "weights"), torch.float64)
    layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 3))
    layers.double().load_state_dict(dict(zip(layers.state_dict(), params.values(), strict=True)))
    inputs = torch.randn(6, 5, generator=generator(0, "inputs"), dtype=torch.float64)
    torch.testing.assert_close(as_module(model, params)(inputs), layers(inputs))


def test_module_can_be_trained_further_without_changing_the_parameters_it_came_from() -> None:
    model: Model = Mlp((5, 7, 4), 3)
    params = model.init(generator(0, "weights"), torch.float32)
    before = {name: value.clone() for name, value in params.items()}
    module = as_module(model, params)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    labels = torch.tensor([0, 1, 2, 0])
    inputs = torch.randn(4, 5, generator=generator(0, "inputs"))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(params[name], before[name]) for name in before)
