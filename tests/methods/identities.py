"""Two methods that must come to the same, each run for a few rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.tensors import Tensors
from small_experiments import build_federation, small

both_engines = pytest.mark.parametrize("engine", ["loop", "stacked"])


def after_rounds(root: Path, method: str, rounds: int = 2, **changes: Any) -> RoundLoop:
    """Return a federation in float64 after some rounds; clients differ in size and labels."""
    settings: dict[str, Any] = {"dtype": "float64", "partition__alpha": 0.5, "train__lr": 0.1}
    federation = build_federation(small(root, method, **settings | changes))
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
