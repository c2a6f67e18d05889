"""Federated Dropout: parts are networks of their own, and are put back where they belong."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from identities import assert_close_tensors, both_engines, differ, server_of
from server_side_runs import Changes, begins_at, data_of, federate
from tiny_method_inputs import make_method

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.engines.trainers.optimizer import MomentumSGD
from mpfedcl.methods import Batch, Context, PartialModel
from mpfedcl.models import Mlp
from mpfedcl.models.units import hidden_units, mask_params
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import assert_same_tensors, build_federation, small

HALF: Changes = {"fed_dropout__share": 0.5}


def units_of(federation: RoundLoop, client: str, number: int) -> Tensors:
    assert isinstance(federation._method, PartialModel)
    return federation._method.masks(federation.state.server, client, number)


@both_engines
def test_training_all_units_equals_fedavg(images: Path, engine: str) -> None:
    found = federate(images, "fed-dropout", fed_dropout__share=1, engine=engine)
    assert_same_tensors(server_of(found), server_of(federate(images, engine=engine)))


def test_defaults_differ_from_fedavg(images: Path) -> None:
    assert differ(
        server_of(federate(images, "fed-dropout", 1)), server_of(federate(images, rounds=1))
    )


def test_each_client_and_round_draws_its_own_part() -> None:
    method = make_method("fed-dropout", fed_dropout__share=0.3)
    params = Mlp((5, 40, 20), 3).init(torch.Generator(), torch.float64)
    server = method.init_server(params)
    parts = [method.masks(server, client, n) for client in ("a", "b") for n in (1, 2)]
    for part in parts:
        assert {layer: int(mask.sum()) for layer, mask in part.items()} == {
            "hidden.0": 12,
            "hidden.1": 6,
        }
    assert len({tuple(part["hidden.0"].tolist()) for part in parts}) == 4
    assert_same_tensors(parts[0], method.masks(server, "a", 1))
    # However small a share is, a unit is left of each layer.
    least = make_method("fed-dropout", fed_dropout__share=0.001).masks(server, "a", 1)
    assert [int(mask.sum()) for mask in least.values()] == [1, 1]


def test_units_are_drawn_uniformly() -> None:
    method = make_method("fed-dropout", fed_dropout__share=0.5)
    server = method.init_server(Mlp((2, 6), 2).init(torch.Generator(), torch.float64))
    masks = [method.masks(server, "a", number)["hidden.0"].double() for number in range(400)]
    # 200 of 400 each, give or take four deviations.
    assert torch.stack(masks).sum(0).sub(200).abs().max() < 40


@both_engines
def test_part_trains_like_a_smaller_network(images: Path, engine: str) -> None:
    """The same steps as those of a network that is built of the kept rows and columns alone."""
    settings: Changes = {**HALF, "engine": engine, "train__lr": 0.1, "rounds": 1}
    begun = begins_at(images)
    federation = federate(images, "fed-dropout", **settings)
    models = dict(federation.engine.personal_models({}))
    experiment = small(images, "fed-dropout", **settings).resolved()
    data = data_of(images)
    fresh = build_federation(small(images, "fed-dropout", dtype="float64", **settings))
    for client in data.clients:
        units = units_of(fresh, client.name, 1)
        kept = {layer: mask.nonzero().squeeze(1) for layer, mask in units.items()}
        first, second = kept["hidden.0"], kept["hidden.1"]
        part = {
            "hidden.0.weight": begun["hidden.0.weight"][first],
            "hidden.0.bias": begun["hidden.0.bias"][first],
            "hidden.1.weight": begun["hidden.1.weight"][second][:, first],
            "hidden.1.bias": begun["hidden.1.bias"][second],
            "classifier.weight": begun["classifier.weight"][:, second],
            "classifier.bias": begun["classifier.bias"],
        }
        part = {name: value.clone().requires_grad_() for name, value in part.items()}
        model = Mlp((data.input_size, len(first), len(second)), data.num_classes)
        optimizer = MomentumSGD(part, 0.1, 0.5)
        for rows in draw_batches(client, experiment, 1):
            _, logits = model.apply(part, client.inputs[rows])
            loss = torch.nn.functional.cross_entropy(logits, client.labels[rows])
            optimizer.step(list(torch.autograd.grad(loss, list(part.values()))))
        found = models[client.name]
        masks = mask_params(begun, units)
        for name, value in part.items():
            own = found[name][masks[name]].view(value.shape)
            torch.testing.assert_close(own, value.detach(), rtol=1e-11, atol=1e-12)
            # What was removed is zero to the end.
            assert not found[name][~masks[name]].any()


@both_engines
@pytest.mark.parametrize("fill", ["holders", "zero"])
def test_parameters_are_averaged_over_the_clients_that_trained_them(
    images: Path, engine: str, fill: str
) -> None:
    settings: Changes = {
        **HALF,
        "engine": engine,
        "dtype": "float64",
        "fed_dropout__fill": fill,
    }
    federation = build_federation(small(images, "fed-dropout", **settings))
    sizes, nobody = federation.engine.sizes, 0
    for number in (1, 2):
        begun = server_of(federation)
        parts = {client: units_of(federation, client, number) for client in sizes}
        masks = {client: mask_params(begun, units) for client, units in parts.items()}
        record = federation.run_round(evaluate=False, keep_models=True)
        assert "factored" not in record.remarks["training"]
        models = dict(federation.engine.personal_models({}))
        for name, before in begun.items():
            found = server_of(federation)[name]
            for place in numpy.ndindex(*before.shape):
                holders = [client for client in sizes if masks[client][name][place]]
                weight = sum(sizes[client] for client in holders)
                total = sum(
                    sizes[client] * float(models[client][name][place]) for client in holders
                )
                if not holders:
                    nobody += 1
                    assert fill == "zero" or found[place] == before[place]
                    continue
                if fill == "zero":
                    total += (sum(sizes.values()) - weight) * float(before[place])
                    weight = sum(sizes.values())
                assert float(found[place]) == pytest.approx(total / weight, rel=1e-11, abs=1e-13)
    assert nobody > 0


def test_engines_give_the_same_model(images: Path) -> None:
    settings: Changes = {"rounds": 3, "clients": 5, "fraction": 0.8}
    loop, stacked = (
        federate(images, "fed-dropout", engine=e, **settings) for e in ("loop", "stacked")
    )
    assert_close_tensors(server_of(loop), server_of(stacked), 1e-11)


def test_only_the_bytes_of_the_parts_are_counted(images: Path, tmp_path: Path) -> None:
    result = run(small(images, "fed-dropout", rounds=1, model__hidden=(8, 4)), tmp_path / "run")
    (record,) = result.history
    # 6 of 8 and 3 of 4 units, and a bit for each of the 12.
    numbers = 36 * 6 + 6 + 6 * 3 + 3 + 3 * 3 + 3
    assert record["sent"]["parameters"] == numbers
    assert record["bytes"] == {"up": 3 * 4 * numbers, "down": 3 * (4 * numbers + 2)}
    assert 0 <= record["remarks"]["parts"]["untrained_units"] < 0.5
    # The whole model predicts.
    assert record["accuracy"]["local_test"]["global_classifier"] is not None


def test_activations_of_a_part_can_be_scaled_up() -> None:
    """Half of the units, each twice as active."""
    method = make_method("fed-dropout", fed_dropout__scale=True, **HALF)
    model = Mlp((5, 4, 2), 3)
    params = model.init(torch.Generator(), torch.float64)
    inputs, labels = torch.randn(6, 5).double(), torch.arange(6) % 3
    batch = Batch(inputs, labels, torch.ones(6, dtype=torch.bool))
    found = method.loss(params, batch, Context(model.apply, params, None, {}))
    first = torch.relu(inputs @ params["hidden.0.weight"].T + params["hidden.0.bias"])
    second = torch.relu(2 * first @ params["hidden.1.weight"].T + params["hidden.1.bias"])
    logits = 2 * second @ params["classifier.weight"].T + params["classifier.bias"]
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, labels))
    assert hidden_units(params) == {"hidden.0": 4, "hidden.1": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aggregation__rule": "median"}, "aggregation.rule is 'median'; with method fed-dropout"),
        ({"fed_dropout__share": 0}, "fed_dropout.share is 0; it must be greater than 0"),
        ({"fed_dropout__share": 1.5}, "fed_dropout.share is 1.5; it must be less than or equal"),
        ({"secure_aggregation": True}, "secure_aggregation"),
    ],
)
def test_invalid_settings_are_rejected(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        run(small(images, "fed-dropout", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
