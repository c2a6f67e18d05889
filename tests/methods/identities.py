"""Two methods that must come to the same, each run for a few rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import assert_same_tensors, build_federation, small

both_engines = pytest.mark.parametrize("engine", ["loop", "stacked"])


def begin(root: Path, method: str, **changes: Any) -> RoundLoop:
    """Return a federation in float64 before its first round; clients differ in size and labels."""
    settings: dict[str, Any] = {"dtype": "float64", "partition__alpha": 0.5, "train__lr": 0.1}
    return build_federation(small(root, method, **settings | changes))


def after_rounds(root: Path, method: str, rounds: int = 2, **changes: Any) -> RoundLoop:
    """Return such a federation after some rounds."""
    federation = begin(root, method, **changes)
    for _ in range(rounds):
        federation.run_round(evaluate=False, keep_models=True)
    return federation


def server_of(federation: RoundLoop) -> Tensors:
    """Return the server's model."""
    return federation.state.server.params


def models_of(federation: RoundLoop) -> dict[str, Tensors]:
    """Return what each client predicts with."""
    return dict(federation.engine.personal_models(federation.shared_parameters))


def assert_close_tensors(left: Tensors, right: Tensors, tolerance: float = 1e-12) -> None:
    """Hold tensors to each other up to rounding."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=tolerance, atol=tolerance)


def differ(left: Tensors, right: Tensors) -> bool:
    """Tell whether some tensor is another one, by more than rounding."""
    return any(not torch.allclose(left[name], right[name], atol=1e-6) for name in left)


def assert_same_model(found: RoundLoop, wanted: RoundLoop, engine: str) -> None:
    """Hold two servers to the same model: to the bit, or as far as a stack's sums go."""
    if engine == "loop":
        assert_same_tensors(server_of(found), server_of(wanted))
    assert_close_tensors(server_of(found), server_of(wanted))


def slopes_of(
    method: Method, params: Tensors, batch: Batch, context: Context
) -> tuple[Tensor, Tensors]:
    """Return the loss of a batch and its gradient."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = method.loss(leaves, batch, context)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, found, strict=True))
