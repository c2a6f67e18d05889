"""Prototypes: clustering, the pool, and the contrastive loss. Tensors in, tensors out."""

from mpfedcl.prototypes.clustering import (
    cluster_clients,
    cluster_prototypes,
    dbscan_clients,
    mean_clients,
)
from mpfedcl.prototypes.contrast import (
    ContrastTargets,
    contrastive_loss,
    prepare_contrast,
    prototype_contrastive_loss,
)
from mpfedcl.prototypes.pool import PrototypePool
from mpfedcl.prototypes.prototypes import Prototypes

__all__ = [
    "ContrastTargets",
    "PrototypePool",
    "Prototypes",
    "cluster_clients",
    "cluster_prototypes",
    "contrastive_loss",
    "dbscan_clients",
    "mean_clients",
    "prepare_contrast",
    "prototype_contrastive_loss",
]
