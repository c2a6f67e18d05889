"""Gaussian classifiers in closed form, from sufficient statistics: tensors in, tensors out."""

from mpfedcl.gaussian.classifier import (
    ABSENT,
    Components,
    Covariance,
    Degrees,
    Metric,
    Shrinkage,
    choose_shrinkage,
    make_components,
    own_strength,
    score,
    solve_own,
)
from mpfedcl.gaussian.effects import (
    ClientEffects,
    ClientMeans,
    estimate_effects,
    estimate_effects_of_totals,
)
from mpfedcl.gaussian.plausibility import (
    find_impossible_statistics,
    find_impossible_sums,
    find_impossible_totals,
)
from mpfedcl.gaussian.statistics import (
    MemberSums,
    PoolTotals,
    SecondMoment,
    StackedSums,
    add_statistics,
    center_by_class,
    complete_pool,
    own_statistics,
    pack_symmetric,
    packed_size,
    pool_of_one,
    pooled_of_totals,
    project_features,
    scatter_rows,
    sums_to_fit,
    take_from_pool,
    totals_of_one,
    unit_features,
    unpack_symmetric,
    widen_classes,
    within_from_moment,
)
