"""FedPer: which layers stay at home, and what it is at both ends."""

from pathlib import Path

import pytest
import torch
from identities import after_rounds, begin, both_engines, models_of, server_of
from tiny_method_inputs import make_method

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.models import Mlp
from small_experiments import assert_same_tensors


@both_engines
def test_zero_personal_layers_equal_fedavg(images: Path, engine: str) -> None:
    found = after_rounds(images, "fedper", engine=engine, fedper__layers=0)
    wanted = after_rounds(images, "fedavg", engine=engine)
    assert_same_tensors(server_of(found), server_of(wanted))


@both_engines
def test_all_layers_personal_equals_local(images: Path, engine: str) -> None:
    found = models_of(after_rounds(images, "fedper", engine=engine, fedper__layers=3))
    wanted = models_of(after_rounds(images, "local", engine=engine))
    assert found.keys() == wanted.keys()
    for name, params in found.items():
        assert_same_tensors(params, wanted[name])


@both_engines
def test_single_client_equals_fedavg(images: Path, engine: str) -> None:
    # The mean of one is itself, so it goes on where it stopped either way.
    found = models_of(after_rounds(images, "fedper", engine=engine, clients=1))
    wanted = models_of(after_rounds(images, "fedavg", engine=engine, clients=1))
    (ours,), (theirs,) = found.values(), wanted.values()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-12)


@both_engines
def test_round_averages_the_base_and_keeps_the_heads(images: Path, engine: str) -> None:
    federation = begin(images, "fedper", engine=engine, clients=4, fraction=0.5, rounds=4)
    heads: dict[str, Tensors] = {}
    for _ in range(4):
        record = federation.run_round(evaluate=False, keep_models=True)
        models, drawn = models_of(federation), record.clients.answered
        assert len(drawn) == 2
        sizes = {name: federation.engine.sizes[name] for name in drawn}
        for name, mean in federation.shared_parameters.items():
            assert not name.startswith("classifier")
            # Σ p_i w_i over those who took part.
            total = sum(size * models[each][name] for each, size in sizes.items())
            wanted = torch.as_tensor(total) / sum(sizes.values())
            torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-12)
        for client, params in models.items():
            head = {name: params[name] for name in ("classifier.weight", "classifier.bias")}
            if client not in drawn and client in heads:
                assert_same_tensors(head, heads[client])
            heads[client] = head
    bias = [each["classifier.bias"] for each in heads.values()]
    assert not torch.equal(bias[0], bias[1])


@both_engines
def test_differs_from_fedavg(images: Path, engine: str) -> None:
    found = after_rounds(images, "fedper", engine=engine).shared_parameters
    wanted = after_rounds(images, "fedavg", engine=engine).shared_parameters
    assert not torch.equal(found["hidden.0.weight"], wanted["hidden.0.weight"])


def test_layers_are_counted_from_the_end_of_the_model() -> None:
    # Ten hidden layers: by name the tenth would come second, and the classifier first.
    params = Mlp((3, *[2] * 11), 2).init(torch.Generator(), torch.float64)
    method = make_method("fedper", fedper__layers=2)
    method.initial = params
    at_home = [name for name in params if not method.shared(name)]
    assert at_home == ["hidden.10.weight", "hidden.10.bias", "classifier.weight", "classifier.bias"]


def test_normalization_belongs_to_the_layer_before_it() -> None:
    sizes = {"conv.weight": (2, 1, 3, 3), "norm.weight": (2,), "norm.bias": (2,), "w": (2, 2)}
    for layers, wanted in ((1, {"w"}), (2, {*sizes})):
        method = make_method("fedper", fedper__layers=layers)
        method.initial = {name: torch.zeros(shape) for name, shape in sizes.items()}
        assert {name for name in sizes if not method.shared(name)} == wanted


def test_too_many_personal_layers_are_rejected(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"fedper.layers is 4; the model has 3 layers"):
        begin(images, "fedper", fedper__layers=4)
    with pytest.raises(InvalidInput, match=r"fedper.layers"):
        make_method("fedper", fedper__layers=-1)


def test_privacy_budget_needs_a_shared_classifier() -> None:
    with pytest.raises(InvalidInput, match=r"fedper.layers is 1; with a privacy budget"):
        make_method("fedper", privacy__epsilon=1.0)
