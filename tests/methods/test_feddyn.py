"""FedDyn: by hand, the identity of its gradients, and the optimum that it finds."""

from pathlib import Path

import pytest
import torch
from identities import assert_close_tensors, both_engines, differ, server_of
from server_side_runs import (
    UNEQUAL,
    Changes,
    PlainFedAvg,
    begins_at,
    client_states,
    data_of,
    federate,
    weighted,
)
from tiny_method_inputs import apply, make_method

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.methods import Context, Method, Server, Tally
from mpfedcl.models import Mlp
from small_experiments import build_federation, small


@both_engines
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_server_gradient_is_the_mean_over_all_clients(
    images: Path, engine: str, fraction: float
) -> None:
    settings: Changes = {**UNEQUAL, "clients": 5, "fraction": fraction, "engine": engine}
    federation = federate(images, "feddyn", 4, **settings)
    sizes = federation.engine.sizes
    shares = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    assert_close_tensors(
        federation.state.server.private, weighted(client_states(federation), shares)
    )


@both_engines
def test_matches_a_plain_loop_over_the_formulas(images: Path, engine: str) -> None:
    settings: Changes = {**UNEQUAL, "feddyn__alpha": 0.3, "train__lr": 0.1}
    experiment = small(images, "feddyn", **settings).resolved()
    data, train, alpha = data_of(images, **UNEQUAL), experiment.train, 0.3
    model = Mlp((data.input_size, 8, 4), data.num_classes)
    w = model.init(generator(experiment.seed, "weights"), torch.float64)
    names, total = list(w), sum(len(client.labels) for client in data.clients)
    zeros = {n: torch.zeros_like(w[n]) for n in names}
    own, h = {client.name: dict(zeros) for client in data.clients}, dict(zeros)
    for number in (1, 2, 3):
        models = {}
        for client in data.clients:
            y, velocity = dict(w), dict(zeros)
            for rows in draw_batches(client, experiment, number):
                leaves = {n: v.detach().requires_grad_() for n, v in y.items()}
                _, logits = model.apply(leaves, client.inputs[rows])
                loss = torch.nn.functional.cross_entropy(logits, client.labels[rows])
                for n, v in leaves.items():
                    # As the paper has it: in the loss.
                    loss = loss - (own[client.name][n] * v).sum()
                    loss = loss + alpha / 2 * (v - w[n]).square().sum()
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                for n, g in zip(names, slopes, strict=True):
                    velocity[n] = train.momentum * velocity[n] + g
                    y[n] = y[n] - train.learning_rate(number) * velocity[n]
            models[client.name] = y
        for name, y in models.items():
            own[name] = {n: own[name][n] - alpha * (y[n] - w[n]) for n in names}
        shares = {client.name: len(client.labels) / total for client in data.clients}
        mean = weighted(models, shares)
        h = {n: h[n] - alpha * (mean[n] - w[n]) for n in names}
        w = {n: mean[n] - h[n] / alpha for n in names}
    assert_close_tensors(server_of(federate(images, "feddyn", engine=engine, **settings)), w, 1e-10)


def exact_round(
    method: Method, server: Server, states: list[Tensors], optima: list[float], sizes: list[int]
) -> Server:
    """Run a round of clients with losses 1/2 s_i (w - x_i)², which solve their problem exactly."""
    alpha, received, models = method.experiment.setting("feddyn__alpha"), None, []
    for number, (optimum, curve) in enumerate(zip(optima, (1.0, 3.0, 0.5), strict=True)):
        context = Context(apply, server.params, received, states[number])
        # 0 = s (y - x) - g_i + alpha (y - w)
        y = (curve * optimum + states[number]["w"] + alpha * server.params["w"]) / (curve + alpha)
        gradient = {"w": curve * (y - optimum)}
        still = method.adjust(gradient, {"w": y}, context)[0]["w"]
        torch.testing.assert_close(still, torch.zeros_like(still), rtol=0, atol=1e-12)
        sent, states[number] = method.finish({"w": y}, context, 1)
        assert sent is not None
        models.append(sent)
        # What a client keeps is its gradient where it has come to rest.
        torch.testing.assert_close(states[number], gradient, rtol=1e-9, atol=1e-12)
    total = sum(sizes)
    mean = {
        "w": torch.stack([n / total * m["w"] for n, m in zip(sizes, models, strict=True)]).sum(0)
    }
    return method.reduce(server, mean, Tally([], sizes, [], [], 1.0, {}, {}))


@pytest.mark.parametrize(("alpha", "rounds"), [(0.3, 120), (3.0, 120)])
def test_converges_to_the_optimum_of_the_weighted_losses(alpha: float, rounds: int) -> None:
    method = make_method("feddyn", feddyn__alpha=alpha)
    sizes, optima, curves = [1, 2, 5], [0.0, 4.0, -3.0], [1.0, 3.0, 0.5]
    pulls = [n * s for n, s in zip(sizes, curves, strict=True)]
    best = sum(p * x for p, x in zip(pulls, optima, strict=True)) / sum(pulls)
    server = method.init_server({"w": torch.tensor([1.0], dtype=torch.float64)})
    states = [method.init_client(server.params) for _ in optima]
    for _ in range(rounds):
        server = exact_round(method, server, states, optima, sizes)
    assert float(server.params["w"]) == pytest.approx(best, abs=1e-9)
    # There the clients' gradients cancel, and FedAvg's mean of their own optima is elsewhere.
    assert float(server.private["w"]) == pytest.approx(0, abs=1e-9)
    assert best != pytest.approx(sum(n * x for n, x in zip(sizes, optima, strict=True)) / 8, abs=1)


@both_engines
def test_first_round_moves_twice_as_far_as_fedprox(images: Path, engine: str) -> None:
    """No gradient is known yet: h / alpha is minus the mean change."""
    begun = begins_at(images)
    settings: Changes = {"engine": engine, "rounds": 1}
    pulled = server_of(federate(images, "fedprox", fedprox__mu=0.1, **settings))
    found = server_of(federate(images, "feddyn", **settings))
    wanted = {name: 2 * pulled[name] - begun[name] for name in begun}
    assert_close_tensors(found, wanted)


def test_defaults_differ_from_fedavg(images: Path) -> None:
    found = federate(images, "feddyn", 1)
    assert differ(server_of(found), server_of(federate(images, rounds=1, method_class=PlainFedAvg)))


def test_messages_have_the_bytes_of_fedavg(images: Path) -> None:
    records = [
        build_federation(small(images, n)).run_round(evaluate=False) for n in ("feddyn", "fedavg")
    ]
    assert records[0].bytes == records[1].bytes
