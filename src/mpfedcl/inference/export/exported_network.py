"""A trained run as one module of torch: bytes of images in, label, distance and scores out."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import pixel_constants
from mpfedcl.data.samples import VectorFormat
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.methods import ClosedForm, prototype_rule
from mpfedcl.models.encoders.encoder import ResNetEncoder
from mpfedcl.models.encoders.preprocessing import channels_first
from mpfedcl.models.encoders.random_filters import RandomFilters, apply_filters
from mpfedcl.models.encoders.trainable_encoder import make_model
from mpfedcl.models.resnet import ResNet18
from mpfedcl.prototypes import PrototypePool

PredictionRule = Literal["prototype", "classifier"]

_PREFIX = "encoder."


class ExportedNetwork(nn.Module):
    """Images as bytes [B, h, w] or [B, h, w, 3], or features [B, n], to label and scores.

    By prototype: label [B], distance [B], scores [B, C], the distance to each class's nearest
    prototype with a minus before it. By classifier: label and the softmax. All in float32.
    """

    def __init__(
        self,
        trained: TrainedRun,
        params: Tensors,
        rule: PredictionRule,
        *,
        from_features: bool,
        sharpness: float = 1.0,
    ) -> None:
        super().__init__()
        self._sharpness = sharpness
        weights, self._prepare = _choose_preprocessing(trained, params, from_features)
        if isinstance(trained.method, ClosedForm):
            self._head = trained.method.make_model(trained.input_size)
        else:
            self._head = make_model(
                trained.encoder,
                trained.input_size,
                len(trained.class_names),
                trained.experiment.model,
                takes_features=isinstance(trained.input_format, VectorFormat),
                image_shape=trained.input_format.shape,
            )
        head = {n: v for n, v in params.items() if not n.startswith(_PREFIX)}
        self._weights = _TensorBuffers(weights)
        self._params = _TensorBuffers(head)
        self._project = prototype_rule(trained.method).project
        self._prototypes = None
        if rule == "prototype":
            assert trained.reference is not None
            self._prototypes = PrototypeDistances(trained.reference)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return label, distance and scores, or label and scores."""
        inputs = self._prepare(self._weights.tensors(), images)
        embeddings, logits = self._head.apply(self._params.tensors(), inputs)
        if self._prototypes is None:
            scores = torch.softmax(self._sharpness * logits, dim=1)
            return scores.argmax(dim=1), scores
        distances = self._prototypes(self._project(embeddings))
        return distances.argmin(dim=1), distances.amin(dim=1), -distances


class _TensorBuffers(nn.Module):
    """Tensors by name as buffers, in float32; a buffer's name must not have a dot."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "_") for name in tensors}
        for name, value in tensors.items():
            self.register_buffer(self._names[name], value.detach().float().clone())

    def tensors(self) -> Tensors:
        return {name: self.get_buffer(own) for name, own in self._names.items()}


class PrototypeDistances(nn.Module):
    """The pool, by class: finds the nearest of each class by a product, measures it exactly."""

    def __init__(self, pool: PrototypePool) -> None:
        super().__init__()
        vectors = pool.vectors.detach().float()
        counts = torch.bincount(pool.labels, minlength=pool.num_classes)
        # [C, P] rows of each class; where there are fewer, and where there are none, a row that is
        # infinitely far.
        places = torch.full((pool.num_classes, int(counts.max())), len(pool))
        for label in range(pool.num_classes):
            rows = (pool.labels == label).nonzero().squeeze(1)
            places[label, : len(rows)] = rows
        self.register_buffer("vectors", vectors)
        self.register_buffer("half_squares", vectors.square().sum(1) / 2)
        self.register_buffer("places", places.clamp(max=len(pool) - 1))
        self.register_buffer("first", torch.arange(len(places)) * places.shape[1])
        far = torch.zeros(places.shape).masked_fill(places == len(pool), torch.inf)
        self.register_buffer("far", far)
        self.register_buffer("absent", torch.zeros(len(counts)).masked_fill(counts == 0, torch.inf))

    def forward(self, z: Tensor) -> Tensor:
        """Return [B, C]: the distance to the nearest prototype of each class."""
        vectors, places = self.get_buffer("vectors"), self.get_buffer("places")
        costs = self.get_buffer("half_squares") - z @ vectors.T
        by_class = costs.index_select(1, places.flatten()).view(-1, *places.shape)
        nearest = (by_class + self.get_buffer("far")).argmin(dim=2)
        rows = embedding(nearest + self.get_buffer("first"), places.view(-1, 1)).squeeze(2)
        # By differences: a product would lose half the digits of a small distance.
        distances = (z.unsqueeze(1) - embedding(rows, vectors)).square().sum(dim=2).sqrt()
        return distances + self.get_buffer("absent")


Prepare = Callable[[Tensors, Tensor], Tensor]


def _choose_preprocessing(
    trained: TrainedRun, params: Tensors, from_features: bool
) -> tuple[Tensors, Prepare]:
    """Return the weights before the head, and what happens to an image until it gets there."""
    if from_features:
        return {}, lambda _, features: features
    encoder = trained.encoder
    if encoder is None:
        mean, deviation = pixel_constants(trained.experiment)
        return {}, lambda _, images: (images.float().flatten(1) / 255 - mean) / deviation
    # Others are refused, or joined to the head as graphs.
    assert isinstance(encoder, ResNetEncoder | RandomFilters)
    preprocessing, network = encoder.preprocessing, ResNet18()
    apply = apply_filters if isinstance(encoder, RandomFilters) else network.apply_folded

    def prepare(weights: Tensors, images: Tensor) -> Tensor:
        return apply(weights, preprocessing.standardize(channels_first(images), torch.float32))

    if isinstance(encoder, RandomFilters):
        return encoder.tensors, prepare
    own = {n.removeprefix(_PREFIX): v for n, v in params.items() if n.startswith(_PREFIX)}
    # Where the encoder was trained too, its weights are among the model's; statistics never are.
    return network.fold({**encoder.tensors, **own}), prepare
