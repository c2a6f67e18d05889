"""Prototypes: clustering, the pool, and the contrastive loss. Tensors in, tensors out."""

from mpfedcl.prototypes.automatic import MOST_PROTOTYPES
from mpfedcl.prototypes.clustering import (
    cluster_prototypes,
    dbscan_prototypes,
    kmeans_prototypes,
    mean_prototypes,
)
from mpfedcl.prototypes.contrast import contrastive_loss, prototype_contrastive_loss
from mpfedcl.prototypes.merging import merge_prototypes, spread_kept
from mpfedcl.prototypes.pool import PrototypePool
from mpfedcl.prototypes.prototypes import Prototypes
from mpfedcl.prototypes.targets import ContrastTargets, PoolGrid, prepare_contrast

__all__ = [
    "MOST_PROTOTYPES",
    "ContrastTargets",
    "PoolGrid",
    "PrototypePool",
    "Prototypes",
    "cluster_prototypes",
    "contrastive_loss",
    "dbscan_prototypes",
    "kmeans_prototypes",
    "mean_prototypes",
    "merge_prototypes",
    "prepare_contrast",
    "prototype_contrastive_loss",
    "spread_kept",
]
