"""Structural similarity of small images (Wang et al., 2004), with windows of 7 x 7 pixels."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

WINDOW = 7
STABLE_MEAN, STABLE_DEVIATION = 0.01**2, 0.03**2


def ssim(left: Tensor, right: Tensor) -> Tensor:
    """Return the similarity [n] of images [n, height, width] in 0 to 1; of equal ones it is 1."""
    pair = torch.stack([left, right])
    mean = _local_mean(pair)
    bessel = WINDOW**2 / (WINDOW**2 - 1)
    variance = bessel * (_local_mean(pair.square()) - mean.square())
    covariance = bessel * (_local_mean(pair[:1] * pair[1:]) - mean[:1] * mean[1:])[0]
    brightness = (2 * mean[0] * mean[1] + STABLE_MEAN) / (mean.square().sum(0) + STABLE_MEAN)
    structure = (2 * covariance + STABLE_DEVIATION) / (variance.sum(0) + STABLE_DEVIATION)
    return (brightness * structure).mean(dim=(1, 2))


def _local_mean(images: Tensor) -> Tensor:
    return avg_pool2d(images, WINDOW, stride=1)
