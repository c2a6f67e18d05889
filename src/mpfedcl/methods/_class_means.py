"""One vector a class that a server keeps from round to round, made of its clients' class means."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.prototypes import PrototypePool, Prototypes

NAME = "class_means"
"""[C, d] in the server's state; a class that nobody has held yet has zeros."""


def renew_class_means(
    kept: Tensors, prototypes: Mapping[str, Prototypes], num_classes: int
) -> Tensors:
    """Return the means, by samples, of what clients have sent.

    A class that none of them holds keeps its old mean.
    """
    if not any(len(each) for each in prototypes.values()):
        return kept
    centres = PrototypePool.gather(prototypes, num_classes=num_classes).class_centres()
    old = kept.get(NAME)
    means = centres.vectors.new_zeros(num_classes, centres.dimension) if old is None else old
    return {NAME: means.index_copy(0, centres.labels, centres.vectors)}


def as_pool(kept: Tensors, like: PrototypePool) -> PrototypePool:
    """Return kept means as a pool, in the form of another."""
    means = kept.get(NAME, like.vectors.new_zeros(like.num_classes, like.dimension))
    labels = means.any(dim=1).nonzero().squeeze(1)
    return replace(
        like,
        vectors=means[labels],
        labels=labels,
        counts=torch.ones_like(labels),
        owners=torch.zeros_like(labels),
        names=("global",) if len(labels) else (),
        num_prototypes=1,
    )
