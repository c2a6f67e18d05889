"""Arrivals and runs of asynchronous methods that are small enough for paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Arrival, Server, find_method
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from small_experiments import build_federation, small

EQUAL_SPEEDS: dict[str, Any] = {
    "systems__spread": 0.0,
    "systems__jitter": 0.0,
    "partition__kind": "iid",
}
CLOCK: dict[str, Any] = {"systems__kind": "lognormal"}


def one(value: float) -> Tensors:
    """Return a model of one number."""
    return {"w": torch.tensor([value], dtype=torch.float64)}


def arrival(
    value: float,
    *,
    staleness: int = 0,
    samples: int = 10,
    share: float = 0.5,
    name: str = "w",
    **more: Any,
) -> Arrival:
    """Return an arrival of one client whose model is one number."""
    means = {name: torch.tensor([value], dtype=torch.float64)}
    return Arrival(means, ["a"], [float(samples)], samples, staleness, 1.0, share, **more)


def fold(method: str, server: Server, arrivals: Sequence[Arrival], **settings: Any) -> Server:
    """Return what a method makes of arrivals."""
    found = find_method(method)
    experiment = small(Path("nowhere"), method, **settings).resolved(found.defaults)
    made: Any = found(experiment, 3)
    folded: Server = made.arrive(server, arrivals)
    return folded


def run(
    root: Path, method: str, rounds: int = 3, **changes: Any
) -> tuple[RoundLoop, list[RoundRecord]]:
    """Run a method in double precision on small images; no round leaves the first model."""
    settings = {"dtype": "float64", "engine": "loop", **changes}
    loop = build_federation(small(root, method, rounds=max(1, rounds), **settings))
    return loop, [loop.run_round(evaluate=False) for _ in range(rounds)]


def params_of(root: Path, method: str, rounds: int = 3, **changes: Any) -> Tensors:
    """Return the server's model after such a run."""
    return run(root, method, rounds, **changes)[0].state.server.params


def make(method: str, **settings: Any) -> Any:
    found = find_method(method)
    return found(small(Path("nowhere"), method, **settings).resolved(found.defaults), 3)
