"""ResNet-18 as an encoder, frozen or trained by the clients."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, enumerate_names, explain
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.data_folder import (
    SAFETENSORS,
    TORCH,
    WEIGHTS_VARIABLE,
    list_weights,
    weights_places,
)
from mpfedcl.models.base import Model, apply_in_pieces
from mpfedcl.models.encoders.encoder import Preprocessing, TorchEncoder
from mpfedcl.models.mlp import make_mlp
from mpfedcl.models.resnet import ResNet18, is_statistic

_MOST_NAMES_LISTED = 3
_RANDOM = "--encoder.name random-resnet18 asks for a random encoder"


def find_weights(asked: Path | None, *data_folders: Path) -> Path:
    """Return the weights file: `asked`, else $MPFEDCL_WEIGHTS, else next to the data."""
    named = os.environ.get(WEIGHTS_VARIABLE)
    if asked is not None or named:
        return Path(asked or str(named)).expanduser()
    places = weights_places(*data_folders)
    for place in places:
        # safetensors first.
        for found in filter(None, (list_weights(place, each) for each in (SAFETENSORS, TORCH))):
            if len(found) > 1:
                raise InvalidInput(
                    f"{place} has {', '.join(path.name for path in found)}; encoder.weights must "
                    "name one of them."
                )
            return found[0]
    raise InvalidInput(
        f"encoder.weights is not set, and neither ${WEIGHTS_VARIABLE} nor "
        f"{' nor '.join(str(place) for place in dict.fromkeys(places))} has "
        "a file resnet18*.safetensors or resnet18*.pth; it must name "
        f"ResNet-18 weights, or --encoder.name none trains on pixels ({_RANDOM})."
    )


def load_weights(path: Path) -> tuple[Tensors, Preprocessing]:
    """Read a file of ResNet-18 weights; names and shapes must be torchvision's."""
    found: Mapping[str, Any]
    metadata: Mapping[str, str] = {}
    try:
        if path.suffix in SAFETENSORS:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        elif path.suffix in TORCH:
            found = _read_torch_file(path)
        else:
            raise InvalidInput(
                f"encoder.weights is {str(path)!r}; it must be a file "
                f"{' or '.join(f'*{suffix}' for suffix in (*SAFETENSORS, *TORCH))}."
            )
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read ({explain(error)}); encoder.weights must name a "
            f"file of ResNet-18 weights ({_RANDOM})."
        ) from None
    except SafetensorError as error:
        raise InvalidInput(f"{path} cannot be read as safetensors: {error}.") from None
    # The classifier and the batch counters of a whole ResNet-18 are not needed.
    needed = {
        name: value
        for name, value in found.items()
        if not str(name).startswith("fc.") and not str(name).endswith("num_batches_tracked")
    }
    return _check_shapes(needed, path), Preprocessing.from_metadata(metadata, Preprocessing())


def _read_torch_file(path: Path) -> Mapping[str, Any]:
    """Read a state dict written by torch.save; only tensors are read."""
    try:
        # weights_only: reading a pickle can run any program.
        with warnings.catch_warnings():
            # torch warns about odd pickles before it rejects them; the error suffices.
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # Broken bytes make torch raise anything from EOFError to RuntimeError.
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":
            raise InvalidInput(
                f"{path} holds Python objects besides tensors, which are never read because they "
                "can run any program; it must be a plain state dict "
                "(torch.save(model.state_dict(), ...))."
            ) from None
        raise InvalidInput(
            f"{path} cannot be read ({explain(error)}); it must be a file that torch.save wrote."
        ) from None
    if isinstance(found, dict):
        return found
    raise InvalidInput(
        f"{path} holds a {type(found).__name__}; it must be a state dict of ResNet-18."
    )


def _check_shapes(found: Mapping[str, Any], path: Path) -> Tensors:
    shapes = ResNet18().shapes()
    faults = [name for name, shape in shapes.items() if not _fits(found.get(name), shape)]
    faults += [name for name in found if name not in shapes]
    if faults:
        raise InvalidInput(
            f"{path} has {enumerate_names(faults, _MOST_NAMES_LISTED)} missing, unknown or of "
            "another shape or type; it must hold ResNet-18 with torchvision's names and shapes "
            "(fc.* is not needed)."
        )
    tensors = {name: found[name].detach().to(torch.float32).contiguous() for name in shapes}
    broken = [
        name
        for name, value in tensors.items()
        if not value.isfinite().all() or (name.endswith("running_var") and (value < 0).any())
    ]
    if broken:
        raise InvalidInput(
            f"{path} has values in {enumerate_names(broken, _MOST_NAMES_LISTED)} that are "
            "not finite, or variances below 0; its training has failed, so other weights must "
            "be given."
        )
    return tensors


def _fits(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape


class ResNetEncoder(TorchEncoder):
    """ResNet-18 with fixed weights and running statistics, in float32."""

    preprocessing: Preprocessing

    def __init__(
        self,
        name: str,
        tensors: Tensors,
        preprocessing: Preprocessing,
        device: torch.device | str = "cpu",
    ) -> None:
        self._network = ResNet18()
        size = self._network.feature_size
        super().__init__(name, "resnet18", tensors, preprocessing, device, size)

    def apply(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """Return the features [B, 512]."""
        return self._network.apply(tensors, inputs)


def load_resnet(
    weights: Path | None, *data_folders: Path, device: torch.device | str
) -> ResNetEncoder:
    """Return the ResNet-18 encoder with the weights that `find_weights` finds."""
    path = find_weights(weights, *data_folders)
    return ResNetEncoder(f"resnet18 {path.name}", *load_weights(path), device)


def random_resnet(name: str, seed: int, device: torch.device | str) -> ResNetEncoder:
    """Return a ResNet-18 encoder with random weights, the same for equal seeds."""
    tensors = ResNet18().init(generator(seed, "random-resnet18"), torch.float32)
    return ResNetEncoder(name, tensors, Preprocessing(), device)


_PREFIX = "encoder."


class TrainableEncoder(Model):
    """ResNet-18 and the head on its 512 features; every client trains all of it.

    Inputs are pixels in 0 to 255, as bytes or as numbers, either [B, 3, size, size] or flattened
    (see `Preprocessing.to_input_bytes`); the model standardizes them itself. Parameters are
    `encoder.*`, `hidden.0.*` and `classifier.*`.

    The running statistics of batch normalization are constants of this object and no parameters:
    they keep the values of the weights file, so they are never sent, get no gradient, and a client
    with few, skewed images cannot spoil them. The affine weights and biases are trained.
    """

    def __init__(
        self,
        weights: Tensors,
        preprocessing: Preprocessing,
        num_classes: int,
        hidden: tuple[int, ...] = (),
    ) -> None:
        self._network = ResNet18()
        self._head = make_mlp(self._network.feature_size, num_classes, hidden, is_encoded=True)
        self.embedding_size = self._head.embedding_size
        self._preprocessing = preprocessing
        self._weights = {n: v for n, v in weights.items() if not is_statistic(n)}
        self._statistics = {n: v for n, v in weights.items() if is_statistic(n)}
        self.normalization = frozenset(f"{_PREFIX}{n}" for n in self._network.normalization())

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return the given encoder weights and a newly drawn head."""
        encoder = {f"{_PREFIX}{n}": v.to(dtype, copy=True) for n, v in self._weights.items()}
        return {**encoder, **self._head.init(generator, dtype)}

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits."""
        features = apply_in_pieces(lambda some: self._encode(params, some), inputs)
        return self._head.apply(params, features)

    def _encode(self, params: Tensors, inputs: Tensor) -> Tensor:
        size = self._preprocessing.image_size
        own = {n.removeprefix(_PREFIX): v for n, v in params.items() if n.startswith(_PREFIX)}
        like = own["conv1.weight"]
        constants = {n: v.to(like.device, like.dtype) for n, v in self._statistics.items()}
        pixels = inputs.reshape(-1, 3, size, size)
        return self._network.apply(
            {**own, **constants}, self._preprocessing.standardize(pixels, like.dtype)
        )
