"""Packing broadcasts, updates and evaluations is lossless; malformed ones are rejected."""

import contextlib
import io
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from federations import (
    LoopbackFederation,
    assert_like_simulation,
    assert_same_personal_models,
    assert_same_predictors,
    float64_experiment,
    records_of,
)
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpfedcl import run
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.models import Mlp
from mpfedcl.models.units import count_bytes, hidden_units, mask_params
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.packing import (
    Introduction,
    ReportedEvaluation,
    name_dispatch,
    pack_broadcast,
    pack_part,
    pack_part_update,
    pack_update,
    unpack_broadcast,
    unpack_evaluation,
    unpack_part,
    unpack_part_update,
    unpack_update,
)
from mpfedcl.network.transport import Message, MessageError, from_json, to_json
from mpfedcl.prototypes import PrototypePool, Prototypes
from opened_records import from_records
from small_experiments import assert_same_tensors, read_records

NUM_CLASSES = 4
QUICK = settings(max_examples=25, deadline=None)

names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20)
sizes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(
    [
        "a",
        "b",
        "name",
        "classes",
        "train",
        "test",
        "input_size",
        "encoder",
        "num_samples",
        "loss",
        "late",
        "table",
        "local_test",
        "global_test",
        "is_personal",
        "confusion",
        "round",
        "names",
    ]
)
tables = st.dictionaries(keys, anything | st.dictionaries(keys, anything, max_size=4), max_size=8)
odd_arrays = arrays.arrays(
    arrays.scalar_dtypes() | arrays.byte_string_dtypes() | arrays.unicode_string_dtypes(),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
parts = st.dictionaries(
    st.sampled_from(
        [
            "averaged/a",
            "prototypes/vectors",
            "prototypes/labels",
            "prototypes/counts",
            "params/a",
            "/",
            "pool/vectors",
            "pool/labels",
            "pool/counts",
            "pool/owners",
        ]
    ),
    odd_arrays,
    max_size=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shapes = draw(st.dictionaries(names, sizes, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
    return {name: torch.full(shape, 3.7).to(dtype) for name, shape in shapes.items()}


@st.composite
def prototypes(draw: st.DrawFn) -> Prototypes:
    labels = draw(st.lists(st.integers(0, NUM_CLASSES - 1), max_size=6))
    vectors = torch.arange(len(labels) * 3, dtype=torch.float64).reshape(-1, 3) / 7
    counts = torch.tensor([draw(st.integers(1, 99)) for _ in labels], dtype=torch.int64)
    return Prototypes(vectors, torch.tensor(sorted(labels), dtype=torch.int64), counts)


def travel(message: Message) -> Message:
    """Return a message after conversion to Flower's records and back."""
    return from_records(to_records(message))


@QUICK
@given(st.integers(0, 10**6), tensors(), tensors(), st.dictionaries(names, prototypes()))
def test_broadcast_round_trip(
    number: int,
    params: dict[str, torch.Tensor],
    extra: dict[str, torch.Tensor],
    owned: dict[str, Prototypes],
) -> None:
    pool = PrototypePool.gather(owned, num_classes=NUM_CLASSES, dimension=3)
    sent = Broadcast(number, params, extra, pool)
    found = unpack_broadcast(travel(pack_broadcast(sent)), NUM_CLASSES, None)
    assert found.round == number
    assert_same_tensors(found.params, params)
    assert_same_tensors(found.extra, extra)
    assert found.pool.names == pool.names
    for part in ("vectors", "labels", "counts", "owners"):
        assert torch.equal(getattr(found.pool, part), getattr(pool, part))


@QUICK
@given(
    st.integers(0, 10**9),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | tensors(),
    tensors(),
    st.lists(names).map(tuple),
)
def test_update_round_trip(
    num_samples: int,
    loss: float | None,
    averaged: dict[str, torch.Tensor] | None,
    summed: dict[str, torch.Tensor],
    processed: tuple[str, ...],
) -> None:
    sent = Update("a", num_samples, averaged, Prototypes.empty(3), loss, summed, processed)
    found = unpack_update("a", travel(pack_update(sent)))
    assert (found.client, found.num_samples, found.loss) == ("a", num_samples, loss)
    assert found.processed == processed
    assert_same_tensors(dict(found.summed), summed)
    assert (found.averaged is None) == (averaged is None)
    if averaged is not None:
        assert isinstance(found.averaged, dict)
        assert_same_tensors(found.averaged, averaged)


def test_evaluation_round_trip() -> None:
    table: dict[str, dict[str, float | None]] = {
        "local_test": {"global_classifier": 12.5, "personal_prototype": None},
        "global_test": {"global_classifier": None},
    }
    sent = ReportedEvaluation(table, True, [[1, 2, 0], [3, 4, 1]])
    found = unpack_evaluation(travel(Message({"late": vars(sent)})).values["late"], 2)
    assert found.table["local_test"]["global_classifier"] == 12.5
    assert found.table["local_test"]["global_prototype"] is None
    assert (found.is_personal, found.confusion) == (True, [[1, 2, 0], [3, 4, 1]])


@QUICK
@given(
    names,
    st.lists(st.tuples(names, st.integers(0, 99)), min_size=1, unique_by=lambda pair: pair[0]),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
)
def test_introduction_round_trip(
    name: str, classes: list[tuple[str, int]], test: int, input_size: int
) -> None:
    counts = tuple(count + 1 for _, count in classes)
    introduction = Introduction(
        name,
        tuple(each for each, _ in classes),
        counts,
        test,
        input_size,
        "e",
        "images",
        (),
        own_data=False,
    )
    found = Introduction.from_message(name, travel(introduction.to_message()))
    assert found == introduction


OPENERS: list[Callable[[Message], Any]] = [
    lambda message: Introduction.from_message("a", message),
    lambda message: unpack_update("a", message),
    lambda message: unpack_broadcast(message, NUM_CLASSES, 2),
    lambda message: unpack_evaluation(message.values, NUM_CLASSES),
    lambda message: unpack_evaluation(message.value("late", dict), NUM_CLASSES),
]


@pytest.mark.parametrize("open_parcel", OPENERS)
@QUICK
@given(values=tables, found=parts)
def test_any_packed_arrays_are_opened_or_rejected(
    open_parcel: Callable[[Message], Any], values: dict[str, Any], found: dict[str, Any]
) -> None:
    with contextlib.suppress(MessageError):
        open_parcel(Message(values, found))


@QUICK
@given(st.text(max_size=40) | anything.map(json.dumps))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(from_json(text), dict)


@QUICK
@given(st.sampled_from(["safetensors", "numpy.ndarray", ""]), st.binary(max_size=60))
def test_any_bytes_are_parsed_as_arrays_or_rejected(kind: str, data: bytes) -> None:
    records = records_of("{}", Array("uint8", (len(data),), kind, data))
    with pytest.raises(MessageError, match=r"its arrays (cannot be read|are stored as)"):
        from_records(records)


def test_nothing_is_ever_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", explode)
    monkeypatch.setattr(pickle, "loads", explode)
    file = io.BytesIO()
    numpy.save(file, numpy.array([print], dtype=object), allow_pickle=True)
    for data in (file.getvalue(), pickle.dumps(numpy.zeros(3))):
        records = records_of("{}", Array("object", (1,), "safetensors", data))
        with pytest.raises(MessageError, match="its arrays cannot be read"):
            from_records(records)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_numbers_are_packed(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"loss": value})


def test_integer_percentages_become_floats() -> None:
    predictors = ReportedEvaluation(
        {"local_test": {"personal_classifier": 3}, "global_test": {}}, False
    )
    found = unpack_evaluation(json.loads(to_json(vars(predictors))), 2)
    assert found.table["local_test"]["personal_classifier"] == 3.0
    assert type(found.table["local_test"]["personal_classifier"]) is float
    assert found.table["global_test"]["global_prototype"] is None
    assert found.confusion is None


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


def test_only_the_assigned_part_of_a_model_is_sent() -> None:
    message, received = sent("me")
    found = unpack_part(received, message, "me", INITIAL)
    masks = mask_params(INITIAL, UNITS)
    wanted = {name: value * masks[name] for name, value in INITIAL.items()}
    assert_same_tensors(found.params, wanted)
    assert_same_tensors(dict(found.units["me"]), UNITS)
    size = sum(array.nbytes for name, array in message.arrays.items() if name != "extra/x")
    assert size == make_broadcast().num_bytes_to(["me"]) - message.arrays["extra/x"].nbytes
    assert count_bytes(UNITS) == 3


def test_evaluating_clients_get_the_whole_model() -> None:
    message, received = sent("other")
    assert unpack_part(received, message, "other", INITIAL) is received
    assert_same_tensors(received.params, INITIAL)
    message, received = sent("me", is_whole=True)
    found = unpack_part(received, message, "me", INITIAL)
    assert_same_tensors(found.params, INITIAL)
    assert_same_tensors(dict(found.units["me"]), UNITS)


def make_update(averaged: Tensors | None) -> Update:
    return Update("me", 3, averaged, Prototypes.empty(4), 0.5)


def test_partial_update_is_filled_with_server_values() -> None:
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
def test_model_part_round_trip(sizes: list[int], random: Random) -> None:
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
    # A round trip without training changes nothing.
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
def test_update_of_wrong_part_size_is_rejected(meddled: torch.Tensor) -> None:
    update = pack_part_update(make_update(dict(INITIAL)), make_broadcast())
    assert isinstance(update.averaged, dict)
    malformed = replace(update, averaged={**update.averaged, "hidden.1.weight": meddled})
    with pytest.raises(MessageError, match=r"'hidden\.1\.weight' has shape"):
        unpack_part_update(malformed, make_broadcast())


@pytest.mark.parametrize(
    ("layer", "bits"),
    [
        ("hidden.0", torch.zeros(1, dtype=torch.uint8)),
        ("hidden.0", torch.zeros(2)),
        ("hidden.7", torch.zeros(2, dtype=torch.uint8)),
    ],
)
def test_malformed_unit_bits_are_rejected(layer: str, bits: torch.Tensor) -> None:
    message, received = sent("me")
    malformed = Message(message.values, {**message.arrays, f"units/{layer}": bits.numpy()})
    with pytest.raises(MessageError, match="units of"):
        unpack_part(received, malformed, "me", INITIAL)


@pytest.mark.whole
@pytest.mark.usefixtures("quick_network")
@pytest.mark.parametrize(
    ("method", "changes"), [("fed-dropout", {}), ("afd", {"evaluate_every": 2, "rounds": 4})]
)
def test_partial_models_equal_simulation(
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


WHOLE_EVALUATION: dict[str, Any] = {
    "table": {"local_test": {"personal_classifier": 3.0}, "global_test": {}},
    "is_personal": True,
    "confusion": [[1, 2, 0], [3, 4, 1]],
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"table": {"local_test": {}}}, "table by test set"),
        ({"is_personal": 1}, "is_personal"),
        ({"table": {"local_test": {"personal_classifier": 101}, "global_test": {}}}, "table.local"),
        ({"confusion": [1, 2]}, "confusion"),
        ({"confusion": [[1, 2], [3, 4]]}, r"confusion must be \[2\]\[3\]"),
        ({"confusion": [[1, 2, -1], [3, 4, 1]]}, "confusion.0.2 is -1"),
    ],
)
def test_malformed_evaluation_is_rejected(changes: dict[str, Any], field: str) -> None:
    assert unpack_evaluation(WHOLE_EVALUATION, 2).confusion == [[1, 2, 0], [3, 4, 1]]
    with pytest.raises(MessageError, match=field):
        unpack_evaluation(WHOLE_EVALUATION | changes, 2)


def test_asynchronous_answer_repeats_version_and_dispatch() -> None:
    pool = PrototypePool.empty(2, 3, 1)
    broadcast = Broadcast(1, {}, {}, pool)
    assert name_dispatch(broadcast) == {}
    known = replace(broadcast, version=4, dispatch=7)
    assert name_dispatch(known) == {"version": 4, "dispatch": 7}
