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
)
from mpfedcl.gaussian.personal import (
    SHARPNESS,
    SMOOTHING,
    GaussianPool,
    choose_sharpness,
    left_out_scores,
    own_classifier,
)
from mpfedcl.gaussian.plausibility import (
    find_impossible_sums,
    find_impossible_totals,
)
from mpfedcl.gaussian.statistics import (
    SecondMoment,
    add_statistics,
    center_by_class,
    complete_pool,
    own_statistics,
    pack_symmetric,
    pool_of_one,
    pool_parts,
    pooled_of_totals,
    project_features,
    random_features,
    scatter_rows,
    sum_samples,
    sums_to_fit,
    take_from_pool,
    totals_of_one,
    unit_features,
    unpack_symmetric,
    within_from_moment,
)
