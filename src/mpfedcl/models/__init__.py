"""Models as pure functions of their parameters: perceptron, ResNet-18, Gaussian classifier."""

from mpfedcl.models.base import Model
from mpfedcl.models.gaussian_classifier import GaussianClassifier
from mpfedcl.models.mlp import Mlp, make_mlp

__all__ = ["GaussianClassifier", "Mlp", "Model", "make_mlp"]
