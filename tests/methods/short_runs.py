"""A few rounds of a method on small images, in double precision, on the engines that must agree."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.methods import Batch, Context, Method
from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.tensors import Tensors
from small_experiments import assert_same_tensors, build_federation, small


def begin(root: Path, method: str, **changes: Any) -> RoundLoop:
    """Return a federation of three clients of different sizes, before its first round."""
    settings = {
        "dtype": "float64",
        "train__lr": 0.1,
        "partition__kind": "quantity",
        "partition__alpha": 1.0,
    }
    return build_federation(small(root, method, **settings | changes))


def run_rounds(root: Path, method: str, rounds: int = 3, **changes: Any) -> RoundLoop:
    """Return a federation after some rounds."""
    federation = begin(root, method, rounds=rounds, **changes)
    for _ in range(rounds):
        federation.run_round(evaluate=False, keep_models=True)
    return federation


def server_model(federation: RoundLoop) -> Tensors:
    return federation.state.server.params


def own_models(federation: RoundLoop) -> dict[str, Tensors]:
    return dict(federation.engine.personal_models(federation.shared_parameters))


def assert_same_model(found: RoundLoop, wanted: RoundLoop, engine: str) -> None:
    """Hold two servers to the same model: to the bit, or as far as a stack's sums go."""
    left, right = server_model(found), server_model(wanted)
    if engine == "loop":
        assert_same_tensors(left, right)
    assert furthest(left, right) < 1e-12


def furthest(left: Tensors, right: Tensors) -> float:
    """Return by how much two models differ at most."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def slopes_of(
    method: Method, params: Tensors, batch: Batch, context: Context
) -> tuple[Tensor, Tensors]:
    """Return the loss of a batch and its gradient."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = method.loss(leaves, batch, context)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, found, strict=True))
