"""Make the model of an experiment: on samples, on features, or with a trained encoder."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, import_function, load
from mpfedcl.core.rng import seed_for
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import IMAGE_MODELS
from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.encoders.encoder import Encoder
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder, TrainableEncoder
from mpfedcl.models.mlp import Mlp, make_mlp
from mpfedcl.models.module import Factory, ModuleModel
from mpfedcl.models.networks import NETWORKS

_GIVEN: dict[str, Factory] = {}
"""Factories of this process that cannot be imported by name."""


def make_model(
    experiment: Experiment,
    encoder: Encoder | None,
    shape: tuple[int, ...],
    num_classes: int,
    *,
    is_image: bool,
    takes_integers: bool = False,
) -> Model:
    """Return the model of a resolved experiment.

    Args:
        experiment: The settings.
        encoder: The encoder, if there is one.
        shape: Of an input: [height, width] or [height, width, 3] for images, the features of an
            encoder, or any array.
        num_classes: C.
        is_image: Whether inputs are images as they are.
        takes_integers: Whether inputs are integers, such as token ids.
    """
    name, hidden = experiment.model.name or "mlp", experiment.model.hidden
    if encoder is not None and experiment.encoder.train:
        if not isinstance(encoder, ResNetEncoder):
            raise InvalidInput(
                f"encoder.train is true, but the encoder {encoder.name} cannot be trained; "
                "encoder.name must be resnet18 or random-resnet18."
            )
        return TrainableEncoder(encoder.tensors, encoder.preprocessing, num_classes, hidden)
    if name in IMAGE_MODELS and not (is_image and len(shape) > 1):
        raise InvalidInput(
            f"model.name is {name!r}, which takes images as they are; for vectors, tables and an "
            "encoder's features it must be mlp, linear or your own."
        )
    if name == "cnn":
        return Cnn(shape, num_classes, hidden, has_norm=experiment.model.norm == "group")
    if name == "linear":
        return Mlp((math.prod(shape),), num_classes)
    if name == "mlp":
        return make_mlp(math.prod(shape), num_classes, hidden, is_encoded=not is_image)
    return ModuleModel(
        name,
        NETWORKS.get(name) or find_factory(name),
        shape,
        num_classes,
        is_image=is_image,
        takes_integers=takes_integers,
        embedding=experiment.model.embedding,
        seed=seed_for(experiment.seed, "weights"),
        dtype=getattr(torch, experiment.dtype),
    )


def find_factory(name: str) -> Factory:
    """Return the factory that `model.name` names."""
    if name in _GIVEN:
        return _GIVEN[name]
    if name.startswith("given:"):
        raise InvalidInput(
            f"model.name is {name!r}, an object of another process; the same object must be given "
            "again: mpfedcl.resume(path, model=...)."
        )
    if entry := entry_points("mpfedcl.models").get(name):
        factory: Factory = load(entry, "model.name")
        return factory
    return import_function("model.name", name)


def name_factory(model: Any, name: str | None = None) -> str:
    """Return a name by which this process finds a user's factory, class or module.

    What can be imported is named package.module:name. Anything else gets the `name`, by default
    one made from its own, and is found in this process only.
    """
    if isinstance(model, str):
        return model
    if isinstance(model, nn.Module):
        initial = model
        factory: Factory = lambda: initial  # noqa: E731
        plain = type(model).__name__
    elif callable(model):
        factory, plain = model, getattr(model, "__name__", type(model).__name__)
        path = f"{getattr(model, '__module__', None)}:{getattr(model, '__qualname__', '')}"
        if name is None and _is_importable(path, model):
            return path
    else:
        raise InvalidInput(
            f"model is {type(model).__name__} {model!r:.60}; it must be a torch.nn.Module, a "
            "function that returns one, or package.module:function."
        )
    if name is None:
        taken = [each for each, found in _GIVEN.items() if found is not factory]
        names = (f"given:{plain}" + (f"-{n}" if n else "") for n in range(len(taken) + 1))
        name = next(each for each in names if each not in taken)
    _GIVEN[name] = factory
    return name


def _is_importable(path: str, model: Callable[..., Any]) -> bool:
    if path.startswith("__main__:"):
        return False
    try:
        return import_function("model", path) is model
    except InvalidInput:
        return False


def as_module(model: Model, params: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module with these parameters: the user's own, or one around a built-in model."""
    if isinstance(model, ModuleModel):
        return model.as_module(params)
    return BuiltInModule(model, params).eval()


class BuiltInModule(nn.Module):
    """A built-in model as a module that returns logits."""

    def __init__(self, model: Model, params: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._model, self._names = model, list(params)
        self.values = nn.ParameterList([nn.Parameter(each.clone()) for each in params.values()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of inputs, flattened or not."""
        params = dict(zip(self._names, self.values, strict=True))
        return self._model.apply(params, inputs.flatten(1))[1]
