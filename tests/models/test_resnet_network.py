"""ResNet-18 as a pure function, against a network of ordinary modules."""

import pytest
import torch
from torch import Tensor, nn

from mpfedcl.core.tensors import Tensors
from mpfedcl.models.resnet import ResNet18, is_statistic

pytestmark = pytest.mark.whole


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(inputs)))
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        return torch.relu(self.bn2(self.conv2(inner)) + shortcut)


class Modules(nn.Module):
    """The textbook network, written with modules that keep their own state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.average = nn.AdaptiveAvgPool2d(1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pool(torch.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return torch.flatten(self.average(hidden), 1)


def make_modules(seed: int = 0) -> Modules:
    """Return the network with weights and statistics that are nowhere trivial."""
    torch.manual_seed(seed)
    modules = Modules()
    for name, value in modules.state_dict().items():
        if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
            value.uniform_(0.5, 1.5)
        elif value.ndim == 1:
            value.normal_(0, 0.1)
    return modules


def params_of(modules: nn.Module) -> Tensors:
    state = modules.state_dict()
    return {n: v.clone() for n, v in state.items() if not n.endswith("num_batches_tracked")}


@pytest.mark.parametrize("size", [(64, 64), (32, 48), (16, 16), (65, 33)])
def test_features_match_the_modules_in_evaluation_mode(size: tuple[int, int]) -> None:
    modules = make_modules().eval()
    images = torch.randn(3, 3, *size)
    with torch.no_grad():
        expected = modules(images)
        features = ResNet18().apply(params_of(modules), images)
    assert features.shape == (3, 512)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)


def test_names_and_shapes_of_parameters_match_the_modules() -> None:
    network = ResNet18()
    params = network.init(torch.Generator().manual_seed(0), torch.float32)
    expected = {name: value.shape for name, value in params_of(Modules()).items()}
    assert {name: value.shape for name, value in params.items()} == expected
    assert {name: torch.Size(shape) for name, shape in network.shapes().items()} == expected
    assert sum(v.numel() for n, v in params.items() if not is_statistic(n)) == 11_176_512


def test_initial_weights_depend_only_on_the_generator() -> None:
    network = ResNet18()
    single = network.init(torch.Generator().manual_seed(3), torch.float32)
    double = network.init(torch.Generator().manual_seed(3), torch.float64)
    for name, value in single.items():
        assert torch.equal(value, double[name].float())
    deviation = float(double["layer3.1.conv1.weight"].std())
    assert deviation == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert torch.equal(single["bn1.running_var"], torch.ones(64))
    assert torch.equal(single["bn1.bias"], torch.zeros(64))


def test_features_are_independent_of_the_batch_and_keep_the_parameters() -> None:
    params = params_of(make_modules())
    before = {name: value.clone() for name, value in params.items()}
    images = torch.randn(4, 3, 32, 32)
    network = ResNet18()
    together = network.apply(params, images)
    alone = torch.cat([network.apply(params, image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(params[name], before[name]) for name in params)


def test_gradients_match_the_modules_in_evaluation_mode() -> None:
    modules = make_modules().eval().double()
    params = {n: v.requires_grad_(not is_statistic(n)) for n, v in params_of(modules).items()}
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    modules(images).square().sum().backward()
    ResNet18().apply(params, images).square().sum().backward()  # type: ignore[no-untyped-call]
    for name, value in modules.named_parameters():
        torch.testing.assert_close(params[name].grad, value.grad, rtol=1e-6, atol=1e-8)
