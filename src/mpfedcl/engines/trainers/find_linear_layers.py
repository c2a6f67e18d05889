"""The linear layers that a method's loss consists of, found by running it once."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mpfedcl.engines.trainers.base import ClientTask
from mpfedcl.methods import Batch, Context, LocalTraining, Method
from mpfedcl.models import Model


@dataclass(frozen=True)
class Layer:
    """A linear layer as the loss uses it."""

    weight: str
    bias: str | None
    takes_inputs: bool
    """Whether its input is the client's inputs."""


class LinearParameter:
    """A stand-in for a parameter that supports nothing but linear layers."""

    def __init__(self, name: str, run: Callable[..., Tensor]) -> None:
        self.name = name
        self.run = run

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if function is not linear or kwargs or not isinstance(args[1], cls):
            raise TypeError(f"{function} is no linear layer")
        inputs, weight, bias = (*args, None)[:3]
        if not (bias is None or isinstance(bias, cls)):
            raise TypeError("a bias that is no parameter")
        out: Tensor = weight.run(inputs, weight.name, None if bias is None else bias.name)
        return out


def find_layers(
    method: Method, model: Model, task: ClientTask, received: object
) -> tuple[Layer, ...] | None:
    """Return the linear layers that the loss consists of; None if it uses parameters otherwise."""
    train = method.experiment.train
    # The trainers that use the layers draw the batches that the settings ask for.
    is_usual = method.local_training(1)[2:] == LocalTraining.of(train, 1)[2:]
    if not method.plain_steps or not is_usual or train.optimizer != "sgd":
        return None
    layers: list[Layer] = []
    # Two rows, to detect a loss that changes their number; a single sample is used twice.
    both = torch.arange(2, device=task.client.labels.device) % len(task.client.labels)
    inputs, labels = task.client.inputs[both], task.client.labels[both]

    def run(given: Tensor, weight: str, bias: str | None) -> Tensor:
        if given.dim() != 2 or len(given) != len(inputs):
            raise TypeError("a linear layer over other rows than the samples")
        if torch._C._functorch.is_functorch_wrapped_tensor(given):
            raise TypeError("a linear layer that is differentiated by its inputs")
        layers.append(Layer(weight, bias, given is inputs))
        return linear(given, task.start[weight], None if bias is None else task.start[bias])

    params: Any = {name: LinearParameter(name, run) for name in task.start}
    batch = Batch(inputs, labels, torch.ones_like(labels).bool())
    context = Context(model.apply, task.start, received, task.state, task.own)
    try:
        method.loss(params, batch, context)
    except Exception:
        # The other trainers raise it again if it is an error at all.
        return None
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name]
    return tuple(layers) if sorted(used) == sorted(task.start) else None


def check_layer(
    layers: Sequence[Layer],
    batch: Batch,
    seen: Collection[str],
    inputs: Tensor,
    weight: str,
    bias: str | None,
) -> Layer:
    """Return the layer that a step uses; raise if `find_layers` has not found it, or if twice."""
    layer = Layer(weight, bias, inputs is batch.inputs)
    if inputs.shape[:-1] != batch.labels.shape or layer not in layers or weight in seen:
        raise TypeError(f"{weight} is used otherwise than in the first step of the run")
    return layer
