"""Parts of a model over a network: what travels, and that it is what a simulation gives."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from federations import (
    LoopbackFederation,
    assert_like_simulation,
    assert_same_personal_models,
    assert_same_predictors,
    float64_experiment,
)
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl import run
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import Mlp
from mpfedcl.models.parts import count_bytes, hidden_units, mask_params
from mpfedcl.network.message import Message, MessageError
from mpfedcl.network.packing import pack_broadcast, unpack_broadcast
from mpfedcl.network.part_messages import (
    pack_part,
    pack_part_update,
    unpack_part,
    unpack_part_update,
)
from mpfedcl.prototypes import PrototypePool, Prototypes
from small_experiments import assert_same_tensors, read_records

INITIAL = Mlp((5, 11, 4), 3).init(torch.Generator().manual_seed(1), torch.float64)
UNITS = {"hidden.0": torch.arange(11) % 3 > 0, "hidden.1": torch.tensor([True, False, True, False])}


def make_broadcast() -> Broadcast:
    pool = PrototypePool.empty(3, 4, dtype=torch.float64)
    return Broadcast(2, INITIAL, {"x": torch.ones(2)}, pool, {"me": UNITS})


def sent(client: str, *, is_whole: bool = False) -> tuple[Message, Broadcast]:
    packed = pack_broadcast(make_broadcast())
    arrays = pack_part(packed.arrays, make_broadcast(), client, is_whole=is_whole)
    message = Message(packed.values, arrays)
    return message, unpack_broadcast(message, 3, None)


def test_only_its_own_numbers_travel() -> None:
    message, received = sent("me")
    found = unpack_part(received, message, "me", INITIAL)
    masks = mask_params(INITIAL, UNITS)
    wanted = {name: value * masks[name] for name, value in INITIAL.items()}
    assert_same_tensors(found.params, wanted)
    assert_same_tensors(dict(found.units["me"]), UNITS)
    size = sum(array.nbytes for name, array in message.arrays.items() if name != "extra/x")
    assert size == make_broadcast().num_bytes_to(["me"]) - message.arrays["extra/x"].nbytes
    assert count_bytes(UNITS) == 3


def test_others_and_those_who_read_have_the_whole() -> None:
    message, received = sent("other")
    assert unpack_part(received, message, "other", INITIAL) is received
    assert_same_tensors(received.params, INITIAL)
    message, received = sent("me", is_whole=True)
    found = unpack_part(received, message, "me", INITIAL)
    assert_same_tensors(found.params, INITIAL)
    assert_same_tensors(dict(found.units["me"]), UNITS)


def make_update(averaged: Tensors | None) -> Update:
    return Update("me", 3, averaged, Prototypes.empty(4), 0.5)


def test_an_update_has_the_servers_numbers_where_the_client_had_none() -> None:
    trained = {name: value + 1 for name, value in INITIAL.items()}
    packed = pack_part_update(make_update({**trained, "y": torch.ones(1)}), make_broadcast())
    assert isinstance(packed.averaged, dict)
    assert packed.averaged["hidden.1.weight"].shape == (2 * int(UNITS["hidden.0"].sum()),)
    found = unpack_part_update(packed, make_broadcast())
    masks = mask_params(INITIAL, UNITS)
    wanted = {n: torch.where(masks[n], trained[n], INITIAL[n]) for n in INITIAL}
    assert isinstance(found.averaged, dict)
    assert_same_tensors(found.averaged, {**wanted, "y": torch.ones(1)})
    assert found.left_out == sum(int((~mask).sum()) for mask in masks.values())
    assert found.num_bytes == sum(8 * each.numel() for each in packed.averaged.values()) - 4
    withheld = make_update(None)
    assert pack_part_update(withheld, make_broadcast()) is withheld
    assert unpack_part_update(withheld, make_broadcast()) is withheld


@given(st.lists(st.integers(1, 17), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_part_comes_back_as_it_was(sizes: list[int], random: Random) -> None:
    params = Mlp((2, *sizes), 2).init(torch.Generator().manual_seed(1), torch.float64)
    units = {
        layer: torch.tensor([random.random() < 0.5 for _ in range(size)])
        for layer, size in hidden_units(params).items()
    }
    pool = PrototypePool.empty(2, sizes[-1], dtype=torch.float64)
    broadcast = Broadcast(1, params, {}, pool, {"me": units})
    packed = pack_broadcast(broadcast)
    arrays = pack_part(packed.arrays, broadcast, "me", is_whole=False)
    message = Message(packed.values, arrays)
    found = unpack_part(unpack_broadcast(message, 2, None), message, "me", params)
    assert_same_tensors(dict(found.units["me"]), units)
    assert sum(each.nbytes for each in arrays.values()) == broadcast.num_bytes_to(["me"])
    # There and back again: nothing was trained, so nothing has changed.
    update = pack_part_update(make_update(found.params), found)
    returned = unpack_part_update(update, broadcast)
    assert isinstance(returned.averaged, dict)
    assert_same_tensors(returned.averaged, params)


@pytest.mark.parametrize(
    "meddled",
    [
        INITIAL["hidden.1.weight"],
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(2 * int(UNITS["hidden.0"].sum())),
        torch.zeros(0, dtype=torch.float64),
    ],
)
def test_more_or_less_than_its_part(meddled: torch.Tensor) -> None:
    update = pack_part_update(make_update(dict(INITIAL)), make_broadcast())
    assert isinstance(update.averaged, dict)
    lie = replace(update, averaged={**update.averaged, "hidden.1.weight": meddled})
    with pytest.raises(MessageError, match=r"'hidden\.1\.weight' has shape"):
        unpack_part_update(lie, make_broadcast())


@pytest.mark.parametrize(
    ("layer", "bits"),
    [
        ("hidden.0", torch.zeros(1, dtype=torch.uint8)),
        ("hidden.0", torch.zeros(2)),
        ("hidden.7", torch.zeros(2, dtype=torch.uint8)),
    ],
)
def test_bits_that_are_no_part(layer: str, bits: torch.Tensor) -> None:
    message, received = sent("me")
    lie = Message(message.values, {**message.arrays, f"units/{layer}": bits.numpy()})
    with pytest.raises(MessageError, match="units of"):
        unpack_part(received, lie, "me", INITIAL)


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network")
@pytest.mark.parametrize(
    ("method", "changes"), [("fed-dropout", {}), ("afd", {"evaluate_every": 2, "rounds": 4})]
)
def test_as_in_a_simulation(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    experiment = float64_experiment(images, method, partition__test="matched", **changes)
    federation = LoopbackFederation(experiment, tmp_path)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    assert_same_personal_models(federation, wanted.path)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        if theirs["accuracy"] is not None:
            assert_same_predictors(ours, theirs, method)
        # The rest of the model is sent where the last round is read, and told beside.
        reads = ours["round"] > 1 and experiment.evaluates(ours["round"] - 1)
        assert ("bytes_to_read" in ours["remarks"]) == reads
