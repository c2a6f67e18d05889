"""Own models in runs: by name, as an object, as an entry point, and what does not fit."""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import own_models
from command_results import Refused
from mpfedcl import Predictor, resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.models import factory
from mpfedcl.models.factory import find_factory, make_model, name_factory
from mpfedcl.models.networks import NETWORKS
from own_models import Plain, WithNorm
from small_experiments import Say, assert_same_results, flags, read_summary, small

pytestmark = pytest.mark.whole


def make_own(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return Plain(num_classes, input_shape)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as another process, which was given no objects."""
    monkeypatch.setattr(factory, "_GIVEN", {})


def test_what_can_be_imported_is_named_and_found_again() -> None:
    assert name_factory(Plain) == "own_models:Plain"
    assert find_factory("own_models:Plain") is Plain
    assert name_factory("own_models:Plain") == "own_models:Plain"


def test_objects_without_a_name_are_found_in_this_process() -> None:
    first: Callable[[], nn.Module] = lambda: nn.Linear(2, 2)  # noqa: E731
    second: Callable[[], nn.Module] = lambda: nn.Linear(2, 2)  # noqa: E731
    names = [name_factory(each) for each in (first, second, first)]
    assert names[0] == names[2] != names[1]
    assert [find_factory(name) for name in names[:2]] == [first, second]


def test_object_and_name_give_the_same_run(images: Path, tmp_path: Path) -> None:
    by_name = run(small(images, model__name="own_models:Plain"), tmp_path / "name").path
    given = run(small(images), tmp_path / "given", model=lambda **kw: Plain(**kw)).path
    assert_same_results(given, by_name)


def test_module_is_where_training_starts(images: Path, tmp_path: Path) -> None:
    module = Plain(3, (1, 6, 6))
    with torch.no_grad():
        module.head.bias.fill_(5.0)
    settings = {"rounds": 1, "train__lr": 1e-9, "method": "fedavg"}
    result = run(small(images).replace(**settings), tmp_path / "run", model=module)
    # The object itself is not touched.
    assert module.training
    assert not module.head._forward_pre_hooks
    found = Predictor.load(result.path, model=module).params["head.bias"]
    assert torch.allclose(found, torch.full((3,), 5.0))


def test_run_of_an_object_is_resumed_and_used_with_the_same_object_only(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(small(images, rounds=3), tmp_path / "whole", model=lambda **kw: Plain(**kw)).path
    begun = run(small(images), tmp_path / "begun", model=lambda **kw: Plain(**kw)).path
    forget(monkeypatch)
    with pytest.raises(InvalidInput, match="the same object must be given again"):
        resume(begun, rounds=3)
    with pytest.raises(InvalidInput, match="the same object must be given again"):
        Predictor.load(begun)
    with pytest.raises(InvalidInput, match="whose code or constants have changed"):
        resume(begun, rounds=3, model=WithNorm)
    assert_same_results(resume(begun, rounds=3, model=lambda **kw: Plain(**kw)).path, whole)
    with pytest.raises(InvalidInput, match="whose code or constants have changed"):
        Predictor.load(begun, model=WithNorm)


def test_rejected_object_does_not_replace_the_one_of_the_run(images: Path, tmp_path: Path) -> None:
    result = run(small(images), tmp_path / "begun", model=lambda **kw: Plain(**kw))
    pixels = numpy.zeros((1, 6, 6), numpy.uint8)
    before = result.predictor().predict(pixels)
    for use in (partial(resume, rounds=3), Predictor.load):
        with pytest.raises(InvalidInput, match="whose code or constants have changed"):
            use(result.path, model=WithNorm)
        assert result.predictor().predict(pixels) == before
    assert resume(result.path, rounds=3).summary is not None


def test_models_of_timm(images: Path, tmp_path: Path) -> None:
    """Without timm there is one line; with it a run, its prediction and what is refused."""
    experiment = small(images, "fedavg", rounds=1, model__name="timm:test_resnet")
    try:
        import timm
    # Without torchvision, or with one that does not fit torch.
    except (ImportError, RuntimeError):
        with pytest.raises(InvalidInput, match=r"which needs timm \(.*`pip install 'mpfedcl\[v"):
            run(experiment, tmp_path / "run")
        return
    result = run(experiment, tmp_path / "run")
    pixels = numpy.zeros((2, 6, 6), numpy.uint8)
    own = timm.create_model("test_resnet", num_classes=3, in_chans=1)
    assert result.global_model.state_dict().keys() == own.state_dict().keys()
    assert len(result.predictor().predict(pixels)) == 2
    for name, complaint in (
        ("test_resnett", "did you mean timm:test_resnet"),
        ("hf-hub:owner/name", "it must be timm: and a name of timm.list_models"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            find_factory(f"timm:{name}")
    with pytest.raises(InvalidInput, match=r"takes images as they are; samples are \[5\]"):
        find_factory("timm:test_resnet")(num_classes=2, input_shape=(5,))


def test_changed_code_is_noticed(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(small(images, rounds=1, model__name="own_models:WithNorm"), tmp_path / "run").path
    Predictor.load(path)

    class Changed(WithNorm):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return -super().forward(images)

    monkeypatch.setattr(own_models, "WithNorm", Changed)
    with pytest.raises(InvalidInput, match="whose code or constants have changed since the run"):
        Predictor.load(path)


def test_predictions_of_one_image_and_of_many_are_the_same(images: Path, tmp_path: Path) -> None:
    settings = {"model__name": "own_models:with_dropout", "method": "fedavg"}
    predictor = Predictor.load(run(small(images, **settings), tmp_path / "run").path)
    drawn = numpy.random.default_rng(0).integers(0, 255, (20, 6, 6), dtype=numpy.uint8)
    together = [each.label for each in predictor.predict(drawn)]
    assert [predictor.predict(one[None])[0].label for one in drawn] == together


def test_linear_model_is_logistic_regression(images: Path, tmp_path: Path) -> None:
    result = run(small(images, "fedavg", model__name="linear"), tmp_path / "run")
    params = Predictor.load(result.path).params
    assert {name: tuple(value.shape) for name, value in params.items()} == {
        "classifier.weight": (3, 36),
        "classifier.bias": (3,),
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_gray_and_color_images(name: str) -> None:
    sizes = {"cnn-small": 84, "resnet8": 64, "resnet18": 512}
    for shape in ((16, 20), (16, 20, 3)):
        experiment = Experiment(model={"name": name})
        model = make_model(experiment, None, shape, 4, is_image=True)
        params = model.init(torch.Generator(), torch.float32)
        inputs = torch.rand(2, math.prod(shape))
        embeddings, logits = model.apply(params, inputs)
        assert embeddings.shape == (2, sizes[name])
        assert logits.shape == (2, 4)


def test_cnn_of_niid_bench_and_resnet18_have_the_known_sizes() -> None:
    def count(name: str, shape: tuple[int, ...]) -> int:
        model = make_model(Experiment(model={"name": name}), None, shape, 10, is_image=True)
        params = model.init(torch.Generator(), torch.float32)
        return sum(v.numel() for n, v in params.items() if n not in model.buffers)

    # LeNet-5's layers on 32 x 32 RGB, as in NIID-Bench and in PyTorch's CIFAR-10 tutorial.
    assert count("cnn-small", (32, 32, 3)) == 62_006
    # torchvision's 11,689,512 with 1,000 classes, less 990 * 513 for ten.
    assert count("resnet18", (224, 224, 3)) == 11_689_512 - 990 * 513


def test_own_model_on_the_command_line(
    images: Path, tmp_path: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def small(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), "
        "nn.Linear(5, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, _, _ = said("run", *flags(images, model__name="my_nets:small"), "--out", "run")
    assert code == 0
    assert read_summary(tmp_path / "run")["accuracy"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.name": "resnet"},
            "model.name is 'resnet'; it must be one of mlp, linear, cnn,",
        ),
        ({"model.name": "own_models:Nothing"}, "must name an importable package.module:function"),
        ({"model.name": "own_models:Any"}, "'own_models:Any', which "),
        ({"model.name": "linear", "model.hidden": 3}, "model.hidden is (3,); it must be left out"),
        ({"model.name": "mlp", "model.embedding": "x"}, "model.embedding is 'x'; it must be left"),
        ({"model.name": "cnn-small"}, "images have 6 x 6 pixels; they must have at least 16 per"),
        ({"model.name": "resnet8", "encoder.name": "random-filters"}, "with encoder.name 'random-"),
    ],
)
def test_models_that_do_not_fit_are_rejected(
    images: Path, refused: Refused, changes: dict[str, Any], message: str
) -> None:
    words = [f"--{name}={value}" for name, value in changes.items()]
    assert message in refused("run", *flags(images), *words)
