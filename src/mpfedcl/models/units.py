"""Units of hidden layers, found by parameter names.

To thin a layer is to send a client only some of its units.

Layers are named in the order of the network: `conv.0`, ..., `hidden.0`, ..., `classifier`. A filter
of a convolution is a unit too. Inputs, classes and encoders are never thinned. Filters followed by
a normalization layer stay whole, because normalization mixes the filters of a group.
"""

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors

_KINDS = ("conv", "hidden", "classifier")


def hidden_units(params: Tensors) -> dict[str, int]:
    """Return the number of units of each hidden layer that may be thinned, in order."""
    layers = _list_layers(params)[:-1]
    plain = [each for each in layers if f"norm{each.removeprefix('conv')}.weight" not in params]
    return {layer: len(params[f"{layer}.weight"]) for layer in plain}


def feeding_layers(params: Tensors) -> dict[str, str]:
    """Return the hidden layer that feeds each layer; the first is fed by the inputs."""
    layers = _list_layers(params)
    return dict(zip(layers[1:], layers[:-1], strict=True))


def mask_params(params: Tensors, units: Tensors) -> Tensors:
    """Return masks of the parameter values that belong to a part, given its units by layer."""
    masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in params.items()}
    before: Tensor | None = None
    for layer in _list_layers(params):
        weight = params[f"{layer}.weight"]
        out = units.get(layer, weight.new_ones(len(weight), dtype=torch.bool))
        mask = masks[f"{layer}.weight"]
        mask &= out.view(-1, *(1,) * (weight.dim() - 1))
        if before is not None:
            # An image that is laid out flat has all pixels of its first channel first.
            fed = before.repeat_interleave(weight.shape[1] // len(before))
            mask &= fed.view(1, -1, *(1,) * (weight.dim() - 2))
        if f"{layer}.bias" in masks:
            masks[f"{layer}.bias"] = out
        before = out
    return masks


def count_bytes(units: Tensors) -> int:
    """Return the bytes of an encoding of the units: one bit each, layer by layer."""
    return sum(-(-len(each) // 8) for each in units.values())


def _list_layers(params: Tensors) -> list[str]:
    weights = [name.removesuffix(".weight") for name in params if name.endswith(".weight")]
    layers = [tuple(name.split(".")) for name in weights if name.split(".")[0] in _KINDS]
    # By number, not by text: 10 comes after 2.
    order = sorted(layers, key=lambda name: (_KINDS.index(name[0]), *map(int, name[1:])))
    return [".".join(name) for name in order]
