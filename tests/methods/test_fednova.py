"""FedNova: against its formula, and where FedAvg's fixed point is biased."""

from pathlib import Path

import pytest
import torch
from identities import assert_close_tensors, both_engines, differ, server_of
from server_side_runs import UNEQUAL, Changes, federate
from tiny_method_inputs import make_method

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import TrainSettings
from mpfedcl.methods import Method, Server, Tally
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes
from small_experiments import build_federation, small


def gather(method: Method, server: Server, models: list[Tensors], sizes: list[int]) -> Server:
    """Average models as a round does."""
    nothing = Prototypes.empty(3)
    updates = [
        Update(f"client-{number}", size, model, nothing, 0.0)
        for number, (size, model) in enumerate(zip(sizes, models, strict=True))
    ]
    weights = [method.weigh(update, server) for update in updates]
    pairs = list(zip(weights, models, strict=True))
    means = {
        name: torch.stack([weight * model[name] for weight, model in pairs]).sum(0) / sum(weights)
        for name in models[0]
    }
    names = [update.client for update in updates]
    tally = Tally(names, sizes, weights, [0.0] * len(sizes), 1.0, {}, {})
    return method.reduce(server, means, tally)


@both_engines
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_match_the_formula(images: Path, engine: str, momentum: float) -> None:
    settings: Changes = {
        **UNEQUAL,
        "partition__alpha": 3.0,
        "engine": engine,
        "train__momentum": momentum,
    }
    settings |= {"clients": 5, "dtype": "float64"}
    federation = build_federation(small(images, "fednova", **settings))
    train = TrainSettings(batch_size=8, momentum=momentum)
    sizes = federation.engine.sizes
    assert len({train.num_steps(size) for size in sizes.values()}) > 2
    for _ in range(2):
        begun = server_of(federation)
        record = federation.run_round(evaluate=False, keep_models=True)
        assert record.remarks["training"] == {engine: 5}
        models = dict(federation.engine.personal_models({}))
        p = {client: size / sum(sizes.values()) for client, size in sizes.items()}
        a = {n: train.effective_steps(train.num_steps(size)) for n, size in sizes.items()}
        gone = sum(p[client] * a[client] for client in sizes)
        wanted = {}
        for name, w in begun.items():
            each = [p[client] * (w - models[client][name]) / a[client] for client in sizes]
            wanted[name] = w - gone * torch.stack(each).sum(0)
        assert_close_tensors(server_of(federation), wanted)


@both_engines
@pytest.mark.parametrize(
    "changes", [{"partition__kind": "iid"}, {**UNEQUAL, "train__steps": 3}], ids=str
)
def test_equal_numbers_of_steps_equal_fedavg(images: Path, engine: str, changes: Changes) -> None:
    settings: Changes = {**changes, "engine": engine}
    found, wanted = (federate(images, name, **settings) for name in ("fednova", "fedavg"))
    assert_close_tensors(server_of(found), server_of(wanted))


@both_engines
def test_single_client_equals_fedavg(images: Path, engine: str) -> None:
    settings: Changes = {"clients": 1, "engine": engine}
    found, wanted = (federate(images, name, **settings) for name in ("fednova", "fedavg"))
    assert_close_tensors(server_of(found), server_of(wanted))


def test_defaults_differ_from_fedavg(images: Path) -> None:
    found, wanted = (federate(images, name, 1, **UNEQUAL) for name in ("fednova", "fedavg"))
    assert differ(server_of(found), server_of(wanted))
    largest = max(
        float((value - server_of(wanted)[name]).abs().max())
        for name, value in server_of(found).items()
    )
    # No matter of rounding.
    assert largest > 1e-5


@pytest.mark.parametrize(("name", "fixed_point"), [("fedavg", 8.1 / 8.2), ("fednova", 0.9)])
def test_fixed_point_of_two_quadratics(name: str, fixed_point: float) -> None:
    """One client has its optimum at 0 and 1 sample, the other at 1 and 9: p_i x_i sum to 0.9.

    They take 1 and 9 steps. FedAvg ends where 0.1 * 1 step and 0.9 * 9 steps are at rest.
    """
    lr, sizes = 1e-3, [1, 9]
    method = make_method(name, train__batch_size=1, train__momentum=0.0)
    server = method.init_server({"w": torch.tensor([0.5], dtype=torch.float64)})
    for _ in range(1000):
        models = []
        for optimum, steps in zip((0.0, 1.0), sizes, strict=True):
            shrunk = (1 - lr) ** steps
            models.append({"w": optimum + shrunk * (server.params["w"] - optimum)})
        server = gather(method, server, models, sizes)
    assert float(server.params["w"]) == pytest.approx(fixed_point, abs=2e-3)


def test_server_momentum_carries_the_last_step(images: Path) -> None:
    settings: Changes = {**UNEQUAL, "fednova__momentum": 0.6}
    method = make_method("fednova", fednova__momentum=0.6)
    start = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    server = method.init_server(start)
    moved = {"w": start["w"] - 1}
    first = gather(method, server, [moved], [5])
    assert first.params["w"].tolist() == [0.0, 1.0]
    # The second step goes nowhere by itself: only the velocity of the first is left.
    second = gather(method, first, [first.params], [5])
    torch.testing.assert_close(second.params["w"], first.params["w"] - 0.6)
    still = federate(images, "fednova", **UNEQUAL)
    assert still.state.server.private == {}
    assert differ(server_of(federate(images, "fednova", **settings)), server_of(still))
