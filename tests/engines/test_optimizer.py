"""The optimizers against those of torch, bit-identical if both use the same kernel."""

import pytest
import torch

from mpfedcl.engines.trainers.optimizer import Adam, MomentumSGD, make_optimizer
from mpfedcl.experiment.settings import TrainSettings


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.01)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_steps_as_torch_does(momentum: float, decay: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    begun = {
        "w": torch.randn(7, 5, generator=generator, dtype=dtype),
        "b": torch.randn(7, generator=generator, dtype=dtype),
    }
    ours = {name: value.clone().requires_grad_() for name, value in begun.items()}
    theirs = [value.clone().requires_grad_() for value in begun.values()]
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=decay, fused=True)
    descent = MomentumSGD(ours, 0.1, momentum, decay)
    for _ in range(4):
        gradients = [torch.randn(v.shape, generator=generator, dtype=dtype) for v in theirs]
        for value, gradient in zip(theirs, gradients, strict=True):
            value.grad = gradient.clone()
        optimizer.step()
        descent.step(gradients)
    for value, same in zip(theirs, ours.values(), strict=True):
        assert torch.equal(value, same)


def test_first_steps_match_a_hand_computation() -> None:
    params = {"w": torch.tensor([1.0])}
    descent = MomentumSGD(params, lr=0.1, momentum=0.5)
    descent.step([torch.tensor([2.0])])
    assert params["w"].item() == pytest.approx(1 - 0.1 * 2)
    descent.step([torch.tensor([1.0])])
    # v = 0.5 * 2 + 1 = 2
    assert params["w"].item() == pytest.approx(0.8 - 0.1 * 2)


def test_gradient_with_another_layout_gives_the_same_step() -> None:
    gradient = torch.arange(6.0).reshape(3, 2).T
    assert not gradient.is_contiguous()
    params = {"w": torch.zeros(2, 3)}
    MomentumSGD(params, lr=1.0, momentum=0.5).step([gradient])
    assert torch.equal(params["w"], -gradient)


def test_only_the_first_clients_of_a_stack_move() -> None:
    params = {"w": torch.zeros(3, 2)}
    descent = MomentumSGD(params, lr=1.0, momentum=0.5)
    descent.step([torch.ones(3, 2)], 3)
    descent.step([torch.ones(2, 2)], 2)
    assert params["w"].tolist() == [[-2.5, -2.5], [-2.5, -2.5], [-1.0, -1.0]]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_steps_as_torch_does(decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    begun = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    ours, theirs = {"w": begun.clone()}, begun.clone().requires_grad_()
    settings = TrainSettings(optimizer="adam", weight_decay=decay)
    descent = make_optimizer(ours, settings, (0.1, 0.5))
    optimizer = torch.optim.Adam([theirs], lr=0.1, weight_decay=decay)
    for _ in range(4):
        gradient = torch.randn(begun.shape, generator=generator, dtype=torch.float64)
        theirs.grad = gradient.clone()
        optimizer.step()
        descent.step([gradient])
    torch.testing.assert_close(ours["w"], theirs.detach(), rtol=1e-12, atol=1e-12)


def test_adam_moves_only_the_first_clients_of_a_stack() -> None:
    params, alone = {"w": torch.zeros(2, 3)}, {"w": torch.zeros(3)}
    together, single = Adam(params, lr=0.1), Adam(alone, lr=0.1)
    gradients = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0]])
    together.step([gradients], 2)
    together.step([gradients[:1]], 1)
    for _ in range(2):
        single.step([gradients[0]])
    assert torch.equal(params["w"][0], alone["w"])
    assert params["w"][1].tolist() == pytest.approx([-0.1, -0.1, 0.1], abs=1e-6)
