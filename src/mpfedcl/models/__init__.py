"""Networks as pure functions of their parameters: the multilayer perceptron and ResNet-18."""

from mpfedcl.models.base import Model
from mpfedcl.models.mlp import Mlp, make_mlp

__all__ = ["Mlp", "Model", "make_mlp"]
