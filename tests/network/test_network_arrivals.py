"""Asynchronous methods over a network: the loop of arrivals, with clients that are elsewhere."""

from pathlib import Path
from typing import Any

import pytest
from federations import LoopbackFederation, assert_like_simulation, float64_experiment

from mpfedcl import run
from mpfedcl.experiment import Experiment
from small_experiments import read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

EQUAL = {"pace__spread": 0.0, "pace__jitter": 0.0, "pace__seconds_a_sample": 1e-6}
"""In a simulation: all are back within a tick."""
ONE: dict[str, Any] = {"pace__concurrency": 1, "pace__most_a_minute": 0.0, "clients": 3}
METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {},
    "aso-fed": {},
    "fedat": {"fedat__tiers": 1},
    "sageflow": {"pace__tick": 2.0, "public__size": 4},
    "async-share": {"pace__tick": 2.0},
}


def arriving(images: Path, method: str, **changes: Any) -> Experiment:
    return float64_experiment(images, method, **ONE | METHODS[method] | changes)


@pytest.mark.parametrize("method", METHODS)
def test_one_client_at_a_time_gives_the_simulations_result(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = arriving(images, method)
    found = LoopbackFederation(experiment, tmp_path).serve()
    wanted = run(experiment.replace(**EQUAL), tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert ours["arrivals"] == theirs["arrivals"]
