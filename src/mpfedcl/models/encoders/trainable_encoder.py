"""An encoder and the head on it as one model, for those who train both (`--encoder.train`)."""

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import ModelSettings
from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.encoders.encoder import Encoder, ResNetEncoder
from mpfedcl.models.encoders.preprocessing import Preprocessing
from mpfedcl.models.mlp import make_mlp
from mpfedcl.models.resnet import ResNet18, is_statistic

_PREFIX = "encoder."
IMAGES_AT_ONCE = 256
"""Images that pass together where no gradient is asked for: the whole test set would not fit."""


def make_model(
    encoder: Encoder | None,
    input_size: int,
    num_classes: int,
    settings: ModelSettings,
    *,
    trains_encoder: bool = False,
    takes_features: bool = False,
    image_shape: tuple[int, ...] | None = None,
) -> Model:
    """Return the model on pixels, on a frozen encoder's features, or with the encoder in it.

    Vectors that need no encoder are features too (`takes_features`). A CNN needs the shape of
    images, [height, width] or [height, width, 3].
    """
    hidden = settings.hidden
    if settings.name == "cnn":
        if encoder is not None or takes_features or image_shape is None:
            raise InvalidInput(
                "model.name is 'cnn', which takes images as they are; for vectors, tables and an "
                "encoder's features it must be mlp."
            )
        return Cnn(image_shape, num_classes, hidden, has_norm=settings.norm == "group")
    if encoder is None or not trains_encoder:
        is_encoded = takes_features or encoder is not None
        return make_mlp(input_size, num_classes, hidden, is_encoded=is_encoded)
    if not isinstance(encoder, ResNetEncoder):
        raise InvalidInput(
            f"encoder.train is true, but the encoder {encoder.name} cannot be trained; "
            "encoder.name must be resnet18 or random-resnet18."
        )
    return TrainableEncoder(encoder.tensors, encoder.preprocessing, num_classes, hidden)


class TrainableEncoder(Model):
    """ResNet-18 and the head on its 512 features; every client trains all of it.

    Inputs are pixels in 0 to 255, as bytes or as numbers, either [B, 3, size, size] or flattened
    (see `Preprocessing.to_input_bytes`); the model standardizes them itself. Parameters are
    `encoder.*`, `hidden.0.*` and `classifier.*`.

    The running statistics of batch normalization are constants of this object and no parameters:
    they stay what they were in the weights file, so they never travel, get no gradient, and a
    client with few, skewed images cannot spoil them. The affine weights and biases are trained.
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

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return the weights that were given for the encoder, and a head drawn anew."""
        encoder = {f"{_PREFIX}{n}": v.to(dtype, copy=True) for n, v in self._weights.items()}
        return {**encoder, **self._head.init(generator, dtype)}

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits."""
        # A gradient needs all activations anyway, and training batches are small.
        if torch.is_grad_enabled() or len(inputs) <= IMAGES_AT_ONCE:
            return self._head.apply(params, self._encode(params, inputs))
        parts = [self._encode(params, part) for part in torch.split(inputs, IMAGES_AT_ONCE)]
        return self._head.apply(params, torch.cat(parts))

    def _encode(self, params: Tensors, inputs: Tensor) -> Tensor:
        size = self._preprocessing.image_size
        own = {n.removeprefix(_PREFIX): v for n, v in params.items() if n.startswith(_PREFIX)}
        like = own["conv1.weight"]
        constants = {n: v.to(like.device, like.dtype) for n, v in self._statistics.items()}
        pixels = inputs.reshape(-1, 3, size, size)
        return self._network.apply(
            {**own, **constants}, self._preprocessing.standardize(pixels, like.dtype)
        )
