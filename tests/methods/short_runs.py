"""A few rounds of a method on small images, in double precision, on the engines that must agree."""

from pathlib import Path
from typing import Any

import pytest

from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.tensors import Tensors
from small_experiments import build_federation, small

both_engines = pytest.mark.parametrize("engine", ["loop", "stacked"])


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
