"""Models as pure functions of their parameters."""

from mpfedcl.models.base import Model, Tensors
from mpfedcl.models.mlp import Mlp

__all__ = ["Mlp", "Model", "Tensors"]
