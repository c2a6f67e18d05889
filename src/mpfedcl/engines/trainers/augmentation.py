"""Random crops and horizontal flips of training images."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import Part, generator
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import pixel_constants
from mpfedcl.experiment import Experiment

PADDING = 4
"""Pixels added on each side before an image of the original size is cut out."""


@dataclass(frozen=True)
class Augmentation:
    """Crops and flips images; the draws depend on the key only."""

    shape: tuple[int, ...]
    """[height, width], or [height, width, 3]; inputs may be flattened images."""
    black: float
    """The input value of a black pixel."""
    seed: int
    crops: bool
    flips: bool

    @classmethod
    def of(cls, experiment: Experiment, data: FederatedData) -> Self | None:
        """Return the augmentation that an experiment asks for."""
        asked = experiment.train.augment
        if asked == "none":
            return None
        shape = tuple(data.partition.get("input_shape", ()))
        if data.holds_arrays or math.prod(shape) != data.input_size:
            raise InvalidInput(
                f"train.augment is {asked!r}, which takes images; it must be none, because the "
                "samples are arrays."
            )
        mean, deviation = pixel_constants(experiment)
        crops, flips = "crop" in asked, "flip" in asked
        return cls(shape, -mean / deviation, experiment.seed, crops, flips)

    def __call__(self, inputs: Tensor, *key: Part) -> Tensor:
        """Return augmented images."""
        count, (height, width) = len(inputs), self.shape[:2]
        draw = generator(self.seed, *key, "augment")
        shifts = torch.full((2, count, 1), PADDING)
        if self.crops:
            shifts = torch.randint(2 * PADDING + 1, (2, count, 1), generator=draw)
        rows, columns = torch.arange(height) + shifts[0], torch.arange(width) + shifts[1]
        if self.flips:
            is_flipped = torch.randint(2, (count, 1), generator=draw).bool()
            columns = torch.where(is_flipped, columns.flip(1), columns)
        images = inputs.reshape(count, height, width, -1)
        padded = pad(images, (0, 0, *[PADDING] * 4), value=self.black)
        each = torch.arange(count).view(-1, 1, 1)
        places = (each, rows.unsqueeze(2), columns.unsqueeze(1))
        return padded[tuple(place.to(inputs.device) for place in places)].reshape(inputs.shape)
