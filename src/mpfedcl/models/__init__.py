"""Models as pure functions of their parameters: perceptron, CNN, ResNet-18, Gaussian classifier."""

from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.gaussian_classifier import GaussianClassifier
from mpfedcl.models.mlp import Mlp, make_mlp
from mpfedcl.models.units import is_normalization

__all__ = ["Cnn", "GaussianClassifier", "Mlp", "Model", "is_normalization", "make_mlp"]
