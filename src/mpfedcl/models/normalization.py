"""Which parameters belong to normalization layers, told by their names."""

import re

_NORMS = re.compile(r"norm\.\d+\.|encoder\.(.*\.)?(bn\d|downsample\.1)\.")
"""Of `Cnn`, and of a trained ResNet-18, whose names are torchvision's."""


def is_normalization(parameter: str) -> bool:
    """Tell whether a parameter is the scale or the shift of a normalization layer."""
    return _NORMS.match(parameter) is not None
