"""SCAFFOLD: the identities of its controls, a slow loop of its formulas, and the example."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from identities import assert_close_tensors, both_engines, differ, server_of
from server_side_runs import (
    UNEQUAL,
    Changes,
    PlainFedAvg,
    client_states,
    data_of,
    federate,
    weighted,
)

from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import TrainSettings
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.methods.scaffold import Scaffold
from mpfedcl.models import Mlp
from small_experiments import (
    MeddledEngine,
    assemble_federation,
    assert_same_tensors,
    build_federation,
    small,
)


class Uncontrolled(Scaffold):
    """SCAFFOLD whose controls are pinned to zero."""

    def prepare(self, broadcast: Broadcast) -> tuple[Tensors, float]:
        control, lr = super().prepare(broadcast)
        return {name: torch.zeros_like(value) for name, value in control.items()}, lr

    def finish(self, params: Tensors, context: Any, num_steps: int) -> tuple[Tensors, Tensors]:
        sent, _ = super().finish(params, context, num_steps)
        return sent, context.state


@pytest.mark.parametrize(
    ("momentum", "steps", "length"),
    [(0.5, 1, 1), (0.5, 2, 2.5), (0.5, 3, 4.25), (0.0, 7, 7), (0.9, 1, 1)],
)
def test_effective_steps_match_the_closed_form(momentum: float, steps: int, length: float) -> None:
    found = TrainSettings(momentum=momentum).effective_steps(steps)
    assert found == pytest.approx(length, rel=1e-14)


def test_effective_steps_match_momentum_on_a_constant_gradient() -> None:
    train = TrainSettings(momentum=0.7)
    place = velocity = 0.0
    for steps in range(1, 20):
        velocity = 0.7 * velocity + 1
        place += velocity
        assert train.effective_steps(steps) == pytest.approx(place, rel=1e-13)


@pytest.mark.parametrize(("samples", "steps"), [(1, 3), (8, 3), (9, 6), (16, 6), (17, 9)])
def test_last_partial_batch_counts_as_a_step(samples: int, steps: int) -> None:
    assert TrainSettings(epochs=3, batch_size=8).num_steps(samples) == steps


@both_engines
def test_zero_controls_equal_fedavg(images: Path, engine: str) -> None:
    found = federate(images, "scaffold", engine=engine, method_class=Uncontrolled)
    wanted = federate(images, engine=engine, method_class=PlainFedAvg)
    assert_same_tensors(server_of(found), server_of(wanted))


@both_engines
def test_differs_from_fedavg_from_the_second_round_on(images: Path, engine: str) -> None:
    for rounds, differs in ((1, False), (2, True)):
        found = federate(images, "scaffold", rounds, engine=engine)
        wanted = federate(images, rounds=rounds, engine=engine, method_class=PlainFedAvg)
        assert differ(server_of(found), server_of(wanted)) is differs


@both_engines
@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_server_control_is_the_mean_over_all_clients(
    images: Path, engine: str, fraction: float
) -> None:
    settings: Changes = {
        **UNEQUAL,
        "clients": 5,
        "fraction": fraction,
        "train__momentum": 0.8,
    }
    federation = federate(images, "scaffold", 4, engine=engine, **settings)
    sizes = federation.engine.sizes
    own = client_states(federation)
    assert fraction < 1 or own.keys() == sizes.keys()
    shares = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    # A client that has never been drawn has a control of zero.
    assert_close_tensors(federation.state.server.extra, weighted(own, shares))


class Spoiled(MeddledEngine):
    """An engine whose second client sends nothing sound in its second round."""

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterable[Update]:
        for update in updates:
            is_spoiled = (update.client, broadcast.round) == ("client-1", 2)
            yield replace(update, loss=math.nan) if is_spoiled else update


def test_rejected_client_keeps_its_previous_control(images: Path) -> None:
    federation = build_federation(small(images, "scaffold", dtype="float64"), Spoiled)
    federation.run_round(evaluate=False)
    before = client_states(federation)["client-1"]
    assert list(federation.run_round(evaluate=False).clients.rejected) == ["client-1"]
    own, sizes = client_states(federation), federation.engine.sizes
    assert_same_tensors(own["client-1"], before)
    shares = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    assert_close_tensors(federation.state.server.extra, weighted(own, shares))


@both_engines
def test_control_after_one_step_is_the_gradient(images: Path, engine: str) -> None:
    settings: Changes = {"train__batch_size": 64, "engine": engine}
    before, after = (federate(images, "scaffold", n, **settings) for n in (1, 2))
    data = data_of(images)
    model = Mlp((data.input_size, 8, 4), data.num_classes)
    states = client_states(after)
    for client in data.clients:

        def loss(params: Tensors, client: Any = client) -> torch.Tensor:
            _, logits = model.apply(params, client.inputs)
            return torch.nn.functional.cross_entropy(logits, client.labels)

        gradient = torch.func.grad(loss)(server_of(before))
        assert_close_tensors(states[client.name], gradient, 1e-9)


@both_engines
def test_identical_clients_need_no_correction(images: Path, engine: str) -> None:
    settings: Changes = {
        "train__batch_size": 64,
        "train__epochs": 3,
        "engine": engine,
        "dtype": "float64",
    }
    data = data_of(images)
    alike = [replace(data.clients[0], name=each.name) for each in data.clients]
    models = []
    for method in (Scaffold, PlainFedAvg):
        experiment = small(images, method.name, **settings).resolved()
        model = Mlp((data.input_size, 8, 4), data.num_classes)
        same = replace(data, clients=tuple(alike))
        federation = assemble_federation(experiment, same, model, method_class=method)
        for _ in range(3):
            federation.run_round(evaluate=False)
            for control in client_states(federation).values():
                assert_close_tensors(control, federation.state.server.extra)
        models.append(server_of(federation))
    ours, theirs = models
    assert_close_tensors(ours, theirs)


def test_controls_depend_only_on_the_next_broadcast(images: Path) -> None:
    """With all clients and equal steps, c_i - c is known from models: half the bytes would do."""
    settings: Changes = {"partition__kind": "iid", "train__batch_size": 5}
    federation = federate(images, "scaffold", 1, **settings)
    for number in (2, 3):
        before = client_states(federation)
        control = federation.state.server.extra
        federation.run_round(evaluate=False, keep_models=True)
        models = dict(federation.engine.personal_models({}))
        after, train = client_states(federation), TrainSettings(batch_size=5)
        length = train.learning_rate(number) * train.effective_steps(4)
        for client, own in before.items():
            wanted = {
                n: own[n] - control[n] + (server_of(federation)[n] - models[client][n]) / length
                for n in own
            }
            found = {n: after[client][n] - federation.state.server.extra[n] for n in own}
            assert_close_tensors(found, wanted, 1e-9)


def scaffold_by_hand(images: Path, rounds: int, experiment: Experiment) -> Tensors:
    """Run SCAFFOLD step by step; a control is the mean of raw gradients by what they moved."""
    data, train = data_of(images, **UNEQUAL), experiment.train
    model = Mlp((data.input_size, 8, 4), data.num_classes)
    w = model.init(generator(experiment.seed, "weights"), torch.float64)
    names, total = list(w), sum(len(client.labels) for client in data.clients)
    c = {n: torch.zeros_like(w[n]) for n in names}
    own = {client.name: dict(c) for client in data.clients}
    for number in range(1, rounds + 1):
        mean = {n: torch.zeros_like(w[n]) for n in names}
        new = {}
        for client in data.clients:
            y, velocity, raw = dict(w), {n: torch.zeros_like(w[n]) for n in names}, []
            for rows in draw_batches(client, experiment, number):
                leaves = {n: v.detach().requires_grad_() for n, v in y.items()}
                _, logits = model.apply(leaves, client.inputs[rows])
                loss = torch.nn.functional.cross_entropy(logits, client.labels[rows])
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                raw.append(dict(zip(names, slopes, strict=True)))
                for n in names:
                    corrected = raw[-1][n] - own[client.name][n] + c[n]
                    velocity[n] = train.momentum * velocity[n] + corrected
                    y[n] = y[n] - train.learning_rate(number) * velocity[n]
            moved = [sum(train.momentum**j for j in range(len(raw) - k)) for k in range(len(raw))]
            shares = {str(k): a / sum(moved) for k, a in enumerate(moved)}
            new[client.name] = weighted({str(k): each for k, each in enumerate(raw)}, shares)
            for n in names:
                mean[n] += len(client.labels) / total * y[n]
        w, own = mean, new
        c = weighted(own, {client.name: len(client.labels) / total for client in data.clients})
    return w


@both_engines
def test_matches_a_plain_loop_over_the_formulas(images: Path, engine: str) -> None:
    settings: Changes = {
        **UNEQUAL,
        "engine": engine,
        "train__momentum": 0.7,
        "train__lr": 0.1,
    }
    experiment = small(images, "scaffold", **settings).resolved()
    found = federate(images, "scaffold", **settings)
    assert_close_tensors(server_of(found), scaffold_by_hand(images, 3, experiment), 1e-10)


def test_messages_have_twice_the_bytes_of_fedavg(images: Path) -> None:
    federation = build_federation(small(images, "scaffold"))
    record = federation.run_round(evaluate=False)
    size = sum(value.numel() for value in server_of(federation).values())
    assert record.bytes == {"up": 3 * 2 * 4 * size, "down": 3 * 2 * 4 * size}


def test_server_step_scales_the_mean_change(images: Path) -> None:
    whole, half = (federate(images, "scaffold", 1, scaffold__server_lr=each) for each in (1.0, 0.5))
    begun = build_federation(small(images, "scaffold", dtype="float64")).state.server.params
    for name, value in server_of(half).items():
        torch.testing.assert_close(value, (begun[name] + server_of(whole)[name]) / 2)


@pytest.mark.usefixtures("example_methods")
def test_example_matches_the_built_in_method(images: Path) -> None:
    settings: Changes = {**UNEQUAL, "clients": 5, "fraction": 0.6}
    example, ours = (
        federate(images, method, **settings) for method in ("custom_method:Scaffold", "scaffold")
    )
    assert_same_tensors(server_of(example), server_of(ours))
    assert_same_tensors(example.engine.state(), ours.engine.state())
    assert_same_tensors(example.state.server.extra, ours.state.server.extra)
