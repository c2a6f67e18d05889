"""Models as pure functions of their parameters: perceptron, CNN, ResNet-18, Gaussian classifier."""

from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.gaussian_classifier import GaussianClassifier
from mpfedcl.models.mlp import Mlp, make_mlp
from mpfedcl.models.module import ModuleModel

__all__ = ["Cnn", "GaussianClassifier", "Mlp", "Model", "ModuleModel", "make_mlp"]
