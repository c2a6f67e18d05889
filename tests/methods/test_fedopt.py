"""FedOpt: the server's optimizers by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from identities import assert_close_tensors, both_engines, differ, server_of
from server_side_runs import Changes, begins_at, federate
from tiny_method_inputs import make_method

from mpfedcl import resume, run
from mpfedcl.methods import Tally
from small_experiments import HIDDEN, assert_same_run, assert_same_tensors, small

CHANGES = (0.5, -0.25, 0.125, 1.0)
NOBODY = Tally([], [], [], [], 1.0, {}, {})


@both_engines
def test_plain_step_with_learning_rate_1_equals_fedavg(images: Path, engine: str) -> None:
    settings: Changes = {"fedopt__optimizer": "sgd", "fedopt__momentum": 0, "engine": engine}
    found = federate(images, "fedopt", **settings)
    assert_same_tensors(server_of(found), server_of(federate(images, engine=engine)))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "yogi", "adagrad"])
def test_defaults_differ_from_fedavg(images: Path, optimizer: str) -> None:
    wanted = server_of(federate(images, rounds=2))
    found = federate(images, "fedopt", 2, fedopt__optimizer=optimizer)
    assert differ(server_of(found), wanted)


def steps(optimizer: str, **changes: Any) -> list[float]:
    """Return where a server of one number is after each of some changes, beginning at 2."""
    given = {f"fedopt__{name}": value for name, value in changes.items()}
    method = make_method("fedopt", fedopt__optimizer=optimizer, **given)
    server = method.init_server({"w": torch.tensor([2.0], dtype=torch.float64)})
    places = []
    for change in CHANGES:
        server = method.reduce(server, {"w": server.params["w"] + change}, NOBODY)
        places.append(float(server.params["w"]))
    return places


def test_momentum_matches_hand_computed_values() -> None:
    # m = 0.5, then 0.5 * 0.5 - 0.25 = 0, 0.125, 1.0625; each step is half of it.
    wanted = [2.25, 2.25, 2.3125, 2.84375]
    assert steps("sgd", lr=0.5, momentum=0.5) == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
def test_adaptive_steps_match_the_formulas(optimizer: str) -> None:
    tau, beta1, beta2, lr = 0.01, 0.8, 0.9, 0.1
    w, m, v = 2.0, 0.0, tau**2
    wanted = []
    for change in CHANGES:
        m = beta1 * m + (1 - beta1) * change
        if optimizer == "adagrad":
            v = v + change**2
        elif optimizer == "adam":
            v = beta2 * v + (1 - beta2) * change**2
        else:
            v = v - (1 - beta2) * change**2 * math.copysign(1, v - change**2)
        w += lr * m / (math.sqrt(v) + tau)
        wanted.append(w)
    found = steps(optimizer, lr=lr, momentum=beta1, beta2=beta2, adaptivity=tau)
    assert found == pytest.approx(wanted, rel=1e-13)


def test_adagrad_has_no_momentum_by_default() -> None:
    assert steps("adagrad") == steps("adagrad", momentum=0.0, lr=0.01)
    assert steps("adam") == steps("adam", momentum=0.9, lr=0.01)
    assert steps("sgd") == steps("sgd", momentum=0.9, lr=1.0)


@both_engines
def test_one_round_of_adam_matches_the_formula(images: Path, engine: str) -> None:
    """One round of Adam: the mean change is what one round of FedAvg comes to."""
    settings: Changes = {"engine": engine}
    mean, begun = server_of(federate(images, rounds=1, **settings)), begins_at(images)
    tau, wanted = 1e-3, {}
    for name, w in begun.items():
        change = mean[name] - w
        v = 0.99 * tau**2 + 0.01 * change**2
        wanted[name] = w + 0.01 * 0.1 * change / (v.sqrt() + tau)
    assert_close_tensors(server_of(federate(images, "fedopt", 1, **settings)), wanted)


@pytest.mark.whole
def test_optimizer_state_is_never_sent_and_survives_an_interruption(
    images: Path, tmp_path: Path
) -> None:
    settings: Changes = {"fedopt__optimizer": "yogi", "model__hidden": HIDDEN}
    experiment = small(images, "fedopt", rounds=3, **settings)
    run(experiment, tmp_path / "whole")
    result = run(experiment.replace(rounds=1), tmp_path / "stopped")
    resume(tmp_path / "stopped", rounds=3)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    (record,) = result.history
    assert record["bytes"]["down"] == record["bytes"]["up"]
