"""Methods with a model, batches and pools that are small enough for paper."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Context, Method, find_method, prototype_rule
from mpfedcl.methods.messages import Broadcast
from mpfedcl.prototypes import PrototypePool, Prototypes
from small_experiments import METHODS

SCAFFOLD = "custom_method:Scaffold"
ALL_METHODS = (*METHODS, SCAFFOLD)

NUM_CLASSES, DIMENSION = 4, 3
"""Class 3 is one that nobody holds."""


def make_method(name: str, **changes: Any) -> Any:
    """Return a method, of whichever class it is."""
    found = find_method(name)
    settings: dict[str, Any] = {"prototypes__per_class": 2, **changes}
    return found(Experiment(method=name).replace(**settings).resolved(found.defaults), NUM_CLASSES)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_params(seed: int = 1) -> Tensors:
    return {"w": draw(seed, 5, DIMENSION), "c": draw(seed + 100, DIMENSION, NUM_CLASSES)}


def apply(params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A model small enough for paper: v = x W, logits = v C."""
    embeddings = inputs @ params["w"]
    return embeddings, embeddings @ params["c"]


def make_batch(labels: Sequence[int] = (0, 1, 2, 1, 0), seed: int = 2) -> Batch:
    size = len(labels)
    return Batch(draw(seed, size, 5), torch.tensor(labels), torch.ones(size, dtype=torch.bool))


def make_prototypes(labels: Sequence[int], seed: int) -> Prototypes:
    vectors = draw(seed, len(labels), DIMENSION)
    return Prototypes(vectors, torch.tensor(labels), torch.ones(len(labels), dtype=torch.int64))


def make_pool(method: Method) -> PrototypePool:
    """Return a pool in which class 2 is held by one client alone and class 3 by nobody."""
    number = prototype_rule(method).num_prototypes
    single = number == 1
    return PrototypePool.gather(
        {
            "a": make_prototypes([0, 1] if single else [0, 0, 1], 11),
            "b": make_prototypes([0, 1, 2] if single else [0, 0, 1, 1, 2], 12),
        },
        num_classes=NUM_CLASSES,
        num_prototypes=number,
    )


def make_broadcast(method: Method, pool: PrototypePool | None = None) -> Broadcast:
    params = make_params(5)
    extra = {name: 0.01 * draw(6, *value.shape) for name, value in params.items()}
    return Broadcast(2, params, extra, make_pool(method) if pool is None else pool)


def make_context(method: Method, broadcast: Broadcast | None = None, seed: int = 5) -> Context:
    start = make_params(seed)
    state = {name: 0.1 * draw(seed + 7, *v.shape) for name, v in method.init_client(start).items()}
    received = method.prepare(broadcast or make_broadcast(method))
    return Context(apply, start, received, state)
