"""Ragged pools and batches for the contrastive loss, and its formula as a plain loop."""

import math
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from mpfedcl.prototypes import PrototypePool, Prototypes

quick = settings(deadline=None, max_examples=50)
FORMS = ("slots", "pooled", "literal")
PADDINGS = ("all", "fill")


def make_pool(
    seed: int,
    num_clients: int = 3,
    num_classes: int = 4,
    num_prototypes: int = 2,
    dimension: int = 3,
    scale: float = 1.0,
) -> PrototypePool:
    """A ragged pool: each client has 0 to K prototypes of each class but the last, nobody's."""
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for client in range(num_clients):
        held = torch.randint(0, num_prototypes + 1, (num_classes,), generator=generator)
        held[-1] = 0
        labels = torch.arange(num_classes).repeat_interleave(held)
        vectors = torch.randn(len(labels), dimension, dtype=torch.float64, generator=generator)
        clients[f"client-{client}"] = Prototypes(vectors * scale, labels, torch.ones_like(labels))
    return PrototypePool.gather(
        clients, num_classes=num_classes, num_prototypes=num_prototypes, dimension=dimension
    )


def make_batch(seed: int, num_classes: int = 4, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(size, 3, dtype=torch.float64, generator=generator)
    return z, torch.randint(0, num_classes, (size,), generator=generator)


def loop_over_the_formula(
    z: Tensor, labels: Tensor, pool: PrototypePool, temperature: float, form: str, padding: Any
) -> float:
    """L_R as it stands on paper, one sample, client, slot and class after the other."""
    grid, present = pool.padded(padding)
    here = [label for label in range(pool.num_classes) if present[label]]
    losses = []
    for sample, y in zip(z.tolist(), labels.tolist(), strict=True):
        if y not in here:
            continue

        def power(vector: Tensor, sample: list[float] = sample) -> float:
            product = sum(a * b for a, b in zip(sample, vector.tolist(), strict=True))
            return math.exp(product / temperature)

        if form == "pooled":
            pairs = [(power(u), int(a)) for u, a in zip(pool.vectors, pool.labels, strict=True)]
            own = sum(value for value, a in pairs if a == y)
            losses.append(-math.log(own / sum(value for value, _ in pairs)))
            continue
        terms = []
        for client in grid:
            for slot in client:
                total = sum(power(slot[a]) for a in here)
                aims = [y] if form == "slots" else [a for a in here if a != y]
                logs = [-math.log(power(slot[a]) / total) for a in aims]
                terms.append(sum(logs) / len(logs) if logs else 0.0)
        losses.append(sum(terms) / len(terms))
    return sum(losses) / len(losses) if losses else 0.0
