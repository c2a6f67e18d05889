"""Gaussian prototypes in closed form, from sums over clients: tensors in, tensors out."""

from mpfedcl.gaussian.classifier import ABSENT, Components, make_components, score
from mpfedcl.gaussian.covariance import Covariance, Shrinkage, choose_shrinkage
from mpfedcl.gaussian.effects import ClientEffects, ClientMeans, estimate_effects
from mpfedcl.gaussian.features import unit_features
from mpfedcl.gaussian.metric import Metric
from mpfedcl.gaussian.own_covariance import OwnCovariance, own_strength
from mpfedcl.gaussian.plausibility import find_impossible_sums
from mpfedcl.gaussian.stacked_sums import MemberSums, SecondMoment, StackedSums
from mpfedcl.gaussian.sums import (
    centre_by_class,
    pack_symmetric,
    packed_size,
    unpack_symmetric,
)

__all__ = [
    "ABSENT",
    "ClientEffects",
    "ClientMeans",
    "Components",
    "Covariance",
    "MemberSums",
    "Metric",
    "OwnCovariance",
    "SecondMoment",
    "Shrinkage",
    "StackedSums",
    "centre_by_class",
    "choose_shrinkage",
    "estimate_effects",
    "find_impossible_sums",
    "make_components",
    "own_strength",
    "pack_symmetric",
    "packed_size",
    "score",
    "unit_features",
    "unpack_symmetric",
]
