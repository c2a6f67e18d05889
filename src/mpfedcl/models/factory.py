"""Make the model of an experiment: on samples, on features, or with a trained encoder."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points, import_function, load
from mpfedcl.core.rng import generator, seed_for
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import GIVEN
from mpfedcl.experiment.names import IMAGE_MODELS
from mpfedcl.experiment.settings import ModelSettings
from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.encoders.encoder import Encoder
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder, TrainableEncoder
from mpfedcl.models.mlp import Mlp, make_mlp
from mpfedcl.models.module import Factory, ModuleModel
from mpfedcl.models.networks import NETWORKS, TIMM, find_timm_factory
from mpfedcl.models.patterns import PartOfModel

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
    whole = _make_whole(
        experiment, encoder, shape, num_classes, is_image=is_image, takes_integers=takes_integers
    )
    train = experiment.model.train
    if not train or isinstance(whole, ModuleModel):
        return whole
    dtype = getattr(torch, experiment.dtype)
    return PartOfModel(whole, train, whole.init(generator(experiment.seed, "weights"), dtype))


def _make_whole(
    experiment: Experiment,
    encoder: Encoder | None,
    shape: tuple[int, ...],
    num_classes: int,
    *,
    is_image: bool,
    takes_integers: bool,
) -> Model:
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
        train=experiment.model.train,
        seed=seed_for(experiment.seed, "weights"),
        dtype=getattr(torch, experiment.dtype),
    )


def find_factory(name: str) -> Factory:
    """Return the factory that `model.name` names."""
    if name in _GIVEN:
        return _GIVEN[name]
    if name.startswith(GIVEN):
        raise InvalidInput(
            f"model.name is {name!r}, an object of another process; the same object must be given "
            "again: mpfedcl.resume(path, model=...)."
        )
    if name.startswith(TIMM):
        return find_timm_factory(name)
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
        # A copy: training changes its mode, type and hooks.
        factory: Factory = partial(copy.deepcopy, model)
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
        names = (f"{GIVEN}{plain}" + (f"-{n}" if n else "") for n in range(len(taken) + 1))
        name = next(each for each in names if each not in taken)
    _GIVEN[name] = factory
    return name


def is_model(value: Any) -> bool:
    """Return whether a value can be a user's model: a name, a function, a class or a module."""
    return isinstance(value, str) or callable(value)


def name_factories(models: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of models by client; an object that several clients have gets one name."""
    names = {id(each): name_factory(each) for each in {id(e): e for e in models.values()}.values()}
    return {client: names[id(each)] for client, each in models.items()}


@contextmanager
def given_again(model: Any, read: Callable[[], Experiment]) -> Iterator[None]:
    """Let this process find a run's models, given the same objects as to the run, if any.

    Objects that turn out to be others, because the block rejects them, replace none.
    """
    before = dict(_GIVEN)
    try:
        if model is not None:
            _give_again(model, read().model)
        yield
    except InvalidInput:
        _GIVEN.clear()
        _GIVEN.update(before)
        raise


def _give_again(model: Any, settings: ModelSettings) -> None:
    if not isinstance(model, Mapping):
        name_factory(model, settings.name)
        return
    known = settings.names_by_client
    for client, each in model.items():
        if client not in known:
            raise InvalidInput(
                f"model has {client!r}; it must have the clients that the run was begun with: "
                f"{', '.join(known) or 'none'}."
            )
        name_factory(each, known[client])


def _is_importable(path: str, model: Callable[..., Any]) -> bool:
    if path.startswith("__main__:"):
        return False
    try:
        return import_function("model", path) is model
    except InvalidInput:
        return False


def as_module(model: Model, params: Tensors) -> nn.Module:
    """Return a model with its parameters as a module: of inputs [B, ...] it returns logits [B, C].

    A user's own module is returned as it is. For any other model the keys of `state_dict` are the
    names of the parameters.
    """
    if isinstance(model, ModuleModel):
        return model.as_module(params)
    return _ModelModule(model, params).eval()


class _ModelModule(nn.Module):
    """A model as a module, in which `hidden.0.weight` is a parameter of submodules."""

    def __init__(self, model: Model, params: Tensors) -> None:
        super().__init__()
        self._model = model
        for name, value in params.items():
            *places, last = name.split(".")
            owner: nn.Module = self
            for each in places:
                if each not in dict(owner.named_children()):
                    owner.add_module(each, nn.Module())
                owner = owner.get_submodule(each)
            is_trained = value.is_floating_point()
            owner.register_parameter(last, nn.Parameter(value.clone(), requires_grad=is_trained))

    def forward(self, inputs: Tensor) -> Tensor:
        return self._model.apply(dict(self.named_parameters()), inputs.flatten(1))[1]
