"""Messages: what is packed comes out as it was, and what a stranger packs is opened or refused."""

import contextlib
import io
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from federations import records_of
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.network.evaluation import ClientEvaluation, unpack_evaluation
from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.message import Message, MessageError, from_json, to_json
from mpfedcl.network.packing import (
    Introduction,
    check_name,
    pack_broadcast,
    pack_update,
    unpack_broadcast,
    unpack_update,
)
from mpfedcl.prototypes import PrototypePool, Prototypes
from small_experiments import assert_same_tensors

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
    """Return a message as it is after it was Flower's records."""
    return from_records(to_records(message))


@QUICK
@given(st.integers(0, 10**6), tensors(), tensors(), st.dictionaries(names, prototypes()))
def test_a_broadcast_comes_out_as_it_was(
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
def test_an_update_comes_out_as_it_was(
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


def test_readings_come_out_as_they_were() -> None:
    table: dict[str, dict[str, float | None]] = {
        "local_test": {"global_classifier": 12.5, "personal_prototype": None},
        "global_test": {"global_classifier": None},
    }
    sent = ClientEvaluation(table, True, [[1, 2, 0], [3, 4, 1]])
    found = unpack_evaluation(travel(Message({"late": sent.to_values()})).values["late"], 2)
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
def test_an_introduction_comes_out_as_it_was(
    name: str, classes: list[tuple[str, int]], test: int, input_size: int
) -> None:
    counts = tuple(count + 1 for _, count in classes)
    said = Introduction(name, tuple(each for each, _ in classes), counts, test, input_size, "e")
    assert Introduction.from_message(travel(said.to_message())) == said


OPENERS: list[Callable[[Message], Any]] = [
    Introduction.from_message,
    lambda message: unpack_update("a", message),
    lambda message: unpack_broadcast(message, NUM_CLASSES, 2),
    lambda message: unpack_evaluation(message.values, NUM_CLASSES),
    lambda message: unpack_evaluation(message.value("late", dict), NUM_CLASSES),
]


@pytest.mark.parametrize("open_parcel", OPENERS)
@QUICK
@given(values=tables, found=parts)
def test_whatever_a_stranger_packs_is_opened_or_refused(
    open_parcel: Callable[[Message], Any], values: dict[str, Any], found: dict[str, Any]
) -> None:
    with contextlib.suppress(MessageError):
        open_parcel(Message(values, found))


@QUICK
@given(st.text(max_size=40) | anything.map(json.dumps))
def test_any_text_is_values_or_refused(text: str) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(from_json(text), dict)


@QUICK
@given(st.sampled_from(["safetensors", "numpy.ndarray", ""]), st.binary(max_size=60))
def test_any_bytes_are_arrays_or_refused(kind: str, data: bytes) -> None:
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


def test_what_is_too_large_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfedcl.network.flower.records.MOST_BYTES", 1000)
    monkeypatch.setattr("mpfedcl.network.flower.records.LONGEST_TEXT", 100)
    from_records(to_records(Message({}, {"a": numpy.zeros(100)})))
    for message in (
        Message({}, {"a": numpy.zeros(200)}),
        Message({}, {name: numpy.zeros(30) for name in "abcd"}),
        Message({"a": "x" * 100}),
    ):
        with pytest.raises(MessageError, match="it is too large"):
            from_records(to_records(message))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_numbers_are_packed(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"loss": value})


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "a\0b", "é" * 101, "\ud800", "\u202e"]
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(MessageError, match="it must be printable text of at most 200 bytes"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "hospital-a", "Zürich 2", "日本", "a" * 200])
def test_names(name: str) -> None:
    check_name(name)


def test_whole_percentages_come_out_as_floats() -> None:
    predictors = ClientEvaluation(
        {"local_test": {"personal_classifier": 3}, "global_test": {}}, False
    )
    found = unpack_evaluation(json.loads(to_json(predictors.to_values())), 2)
    assert found.table["local_test"]["personal_classifier"] == 3.0
    assert type(found.table["local_test"]["personal_classifier"]) is float
    assert found.table["global_test"]["global_prototype"] is None
    assert found.confusion is None
