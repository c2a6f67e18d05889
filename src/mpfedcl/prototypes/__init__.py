"""Prototypes: clustering, the pool, and the contrastive loss. Tensors in, tensors out."""

from mpfedcl.prototypes.clustering import (
    MOST_PROTOTYPES,
    cluster_prototypes,
    dbscan_prototypes,
    kmeans_prototypes,
    mean_prototypes,
)
from mpfedcl.prototypes.contrast import (
    ContrastTargets,
    contrastive_loss,
    prepare_contrast,
    prototype_contrastive_loss,
)
from mpfedcl.prototypes.finch import finch_pool, finch_prototypes, run_finch
from mpfedcl.prototypes.pool import PrototypePool, Prototypes, merge_prototypes
