"""Gaussian prototypes in closed form, from sums over clients: tensors in, tensors out."""

from mpfedcl.gaussian.classifier import ABSENT, Components, make_components, score
from mpfedcl.gaussian.covariance import Covariance, Shrinkage, choose_shrinkage
from mpfedcl.gaussian.effects import ClientEffects, ClientMeans, estimate_effects
from mpfedcl.gaussian.features import project_features, unit_features
from mpfedcl.gaussian.metric import Metric
from mpfedcl.gaussian.own_covariance import Degrees, OwnCovariance, own_strength
from mpfedcl.gaussian.plausibility import find_impossible_statistics, find_impossible_sums
from mpfedcl.gaussian.stacked_sums import MemberSums, SecondMoment, StackedSums
from mpfedcl.gaussian.statistics import (
    PoolTotals,
    add_statistics,
    complete_pool,
    own_statistics,
    pool_of_one,
    scatter_rows,
    sums_to_fit,
    take_from_pool,
    widen_classes,
)
from mpfedcl.gaussian.sums import (
    centre_by_class,
    moment_from_within,
    pack_symmetric,
    packed_size,
    unpack_symmetric,
    within_from_moment,
)
from mpfedcl.gaussian.totals import (
    estimate_effects_of_totals,
    find_impossible_totals,
    pooled_of_totals,
    totals_of_one,
)

__all__ = [
    "ABSENT",
    "ClientEffects",
    "ClientMeans",
    "Components",
    "Covariance",
    "Degrees",
    "MemberSums",
    "Metric",
    "OwnCovariance",
    "PoolTotals",
    "SecondMoment",
    "Shrinkage",
    "StackedSums",
    "add_statistics",
    "centre_by_class",
    "choose_shrinkage",
    "complete_pool",
    "estimate_effects",
    "estimate_effects_of_totals",
    "find_impossible_statistics",
    "find_impossible_sums",
    "find_impossible_totals",
    "make_components",
    "moment_from_within",
    "own_statistics",
    "own_strength",
    "pack_symmetric",
    "packed_size",
    "pool_of_one",
    "pooled_of_totals",
    "project_features",
    "scatter_rows",
    "score",
    "sums_to_fit",
    "take_from_pool",
    "totals_of_one",
    "unit_features",
    "unpack_symmetric",
    "widen_classes",
    "within_from_moment",
]
