"""Limits of message values, and the error messages beyond them."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.inference.one_shot import check_client_name
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.network.packing import (
    DataFormat,
    Introduction,
    pack_broadcast,
    pack_experiment,
    pack_update,
    unpack_broadcast,
    unpack_update,
)
from mpfedcl.network.transport import (
    FORMAT,
    MOST_BYTES,
    Kind,
    Message,
    MessageError,
    from_json,
    shorten,
    to_json,
)
from mpfedcl.prototypes import PrototypePool, Prototypes

HONEST = Introduction("a", ("x", "y"), (3, 0), 2, 9, "e", "images", (4, 5, 3), True, "", 7)


def introduce(**changes: Any) -> Introduction:
    values = {**HONEST.to_message().values, **changes}
    kept = {name: value for name, value in values.items() if value is not ...}
    return Introduction.from_message("a", Message(kept))


def test_introduction_contains_all_fields() -> None:
    assert introduce() == HONEST
    assert HONEST.to_message().values == {
        "classes": ["x", "y"],
        "train": [3, 0],
        "test": 2,
        "input_size": 9,
        "encoder": "e",
        "samples": "images",
        "image_shape": [4, 5, 3],
        "own_data": True,
        "model": "",
        "embedding_size": 7,
    }
    assert HONEST.num_samples == 3
    # Under a privacy budget counts are not sent, and all clients have equal weight.
    assert introduce(train=[]).num_samples == 1
    assert HONEST.data_format == DataFormat(9, "e", "images", (4, 5, 3))


def test_data_format_is_read_from_federation_json() -> None:
    least = DataFormat.from_json({"input_size": 9, "encoder": "e", "run": "r"})
    assert least == DataFormat(9, "e", "images", ())
    whole = {"input_size": 9, "encoder": "", "samples": "images", "image_shape": [4, 5]}
    assert DataFormat.from_json(whole) == DataFormat(9, "", "images", (4, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"train": [2**40 - 1, 0]},
        {"train": [0, 1]},
        {"test": 0},
        {"test": 2**40 - 1},
        {"input_size": 1},
        {"input_size": 2**22},
        {"encoder": ""},
        {"encoder": "x" * 200},
        {"classes": ["é" * 100, "y"]},
        {"image_shape": []},
        {"image_shape": [4, 5]},
        {"image_shape": [2**16, 2**6]},
        {"samples": "images"},
        {"own_data": False},
        {"classes": [str(n) for n in range(10_000)], "train": [1] * 10_000},
        {"classes": ["x"], "train": [1]},
    ],
)
def test_values_at_the_limits_are_accepted(changes: dict[str, Any]) -> None:
    found = introduce(**changes).to_message().values
    assert {name: found[name] for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"classes": []}, r"^classes is \[\]: "),
        ({"classes": ["x", ""]}, "^classes.1 is '': "),
        ({"classes": ["x", 5]}, "^classes.1 is 5: "),
        ({"classes": ["x", "\ud800"]}, "^classes.1 is "),
        ({"classes": ["é" * 101, "y"]}, "^classes.0 is 'é{76}"),
        ({"classes": [str(n) for n in range(10_001)], "train": [1] * 10_001}, "^classes is "),
        ({"classes": ["x", "x"]}, "^classes must be named once each$"),
        ({"train": [3]}, "^train must be a count of images for each class$"),
        ({"train": [3, 0, 0]}, "^train must be a count of images for each class$"),
        ({"train": [3, -1]}, "^train.1 is -1: "),
        ({"train": [3, 2**40]}, f"^train.1 is {2**40}: "),
        ({"train": [3, True]}, "^train.1 is True: "),
        ({"train": [3, 1.0]}, "^train.1 is 1.0: "),
        ({"train": [10**400, 0]}, "^train.0 is 10{76}"),
        ({"train": [0, 0]}, "^train must have at least one image$"),
        ({"test": -1}, "^test is -1: "),
        ({"test": 2**40}, f"^test is {2**40}: "),
        ({"test": True}, "^test is True: "),
        ({"input_size": 0}, "^input_size is 0: "),
        ({"input_size": 2**22 + 1}, f"^input_size is {2**22 + 1}: "),
        ({"encoder": "a\nb"}, r"^encoder\S* is 'a\\nb': "),
        ({"encoder": None}, r"^encoder\S* is None: "),
        ({"samples": "sounds"}, "^samples is 'sounds': "),
        ({"samples": []}, r"^samples is \[\]: "),
        ({"image_shape": [4]}, r"^image_shape is \[4\]"),
        ({"image_shape": [4, 5, 2]}, r"^image_shape is \[4, 5, 2\]"),
        ({"image_shape": [4, 5, 3, 3]}, r"^image_shape is \[4, 5, 3, 3\]"),
        ({"image_shape": [4, 0]}, "^image_shape.1 is 0: "),
        ({"image_shape": [4, 5.0]}, "^image_shape.1 is 5.0: "),
        ({"image_shape": None}, "^image_shape is None: "),
        ({"image_shape": [4, 2**16 + 1]}, "^image_shape.1 is 65537: "),
        ({"image_shape": [2**16, 2**6, 3]}, r"^image_shape is \[65536, 64, 3\]"),
        ({"image_shape": [10**400, 5]}, "^image_shape.0 is 10{76}"),
        ({"samples": ...}, "^samples is "),
        ({"image_shape": ...}, "^image_shape is "),
        ({"own_data": ...}, "^own_data is "),
        ({"samples": ["images"]}, r"^samples is \['images'\]: "),
        ({"own_data": "yes"}, "^own_data is 'yes': "),
        ({"own_data": 1}, "^own_data is 1: "),
    ],
)
def test_values_just_outside_the_limits_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        introduce(**changes)


def test_only_the_first_error_of_a_long_list_is_described() -> None:
    tracemalloc.start()
    with pytest.raises(MessageError, match=r"^train\.0 is -1: "):
        introduce(train=[-1] * 10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**25


@pytest.mark.parametrize(
    "name", ["", ".hidden", "a/b", "a\\b", ".", "..", "a\nb", "a\x00", "\u202e", "é" * 101]
)
def test_invalid_client_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"without slashes that does not begin with a dot\.$"):
        check_client_name(name)


@pytest.mark.parametrize("name", ["a", "a.b", "é" * 100, "a b", "名前", "hospital-a", "a" * 200])
def test_valid_client_names(name: str) -> None:
    check_client_name(name)


def test_values_are_checked_for_their_type() -> None:
    message = Message({"a": True, "n": 5, "long": "x" * 100})
    assert message.value("n", int) == 5
    assert message.value("a", bool) is True
    with pytest.raises(MessageError, match=r"^a is True; it must be of type int$"):
        message.value("a", int)
    with pytest.raises(MessageError, match=r"^long is 'x{76}\.\.\.; it must be of type int$"):
        message.value("long", int)


def test_long_values_are_shortened() -> None:
    assert shorten("x" * 78) == repr("x" * 78)
    assert shorten("x" * 79) == "'" + "x" * 76 + "..."


def test_values_round_trip_as_json() -> None:
    assert from_json(to_json({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": float("nan")})
    for text, reason in (
        ("[]", "^its values are not a table$"),
        ("{", r"^its values cannot be read \("),
        ("[" * 10**5, r"^its values cannot be read \("),
        ("1" * 5000, r"^its values cannot be read \("),
    ):
        with pytest.raises(MessageError, match=reason):
            from_json(text)
    assert MOST_BYTES == 2 * 1024**3


def test_message_kinds_change_only_with_the_format_version() -> None:
    """A change of the message kinds needs a new format version, which is checked first."""
    assert (FORMAT, get_args(Kind)) == (6, ("hello", "secure", "round", "close"))


def test_arrays_become_independent_tensors() -> None:
    source = numpy.arange(6.0).reshape(2, 3).T
    source.flags.writeable = False
    message = Message({}, {"a/x": source, "a/b/y": numpy.zeros(1), "ab/z": numpy.zeros(1)})
    found = message.tensors("a")
    assert found.keys() == {"x", "b/y"}
    assert found["x"].tolist() == source.tolist()
    assert found["x"].is_contiguous()
    found["x"].zero_()
    assert source[2, 1] == 5.0


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (numpy.array(["a"]), r"^'x' is of type <U1, which no tensor has$"),
        (numpy.zeros(2, ">f8"), "^'x' is of type >f8, which no tensor has$"),
        ({"not": "an array"}, "^'x' is not an array$"),
    ],
)
def test_arrays_of_unsupported_types_are_rejected(array: Any, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        Message({}, {"a/x": array}).tensors("a")
    with pytest.raises(MessageError, match="^'" + "x" * 80 + "' is "):
        Message({}, {"a/" + "x" * 90: array}).tensors("a")


# Updates and broadcasts

ROWS = Prototypes(torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([4, 5]))
UPDATE = Update("a", 9, {"w": torch.ones(2)}, ROWS, 0.5, {"s": torch.zeros(1)}, ("clip",))


def reread(**changes: Any) -> Update:
    sent = pack_update(UPDATE)
    return unpack_update("a", Message({**sent.values, **changes}, sent.arrays))


def test_update_is_packed_as_named_values_and_arrays() -> None:
    sent = pack_update(UPDATE)
    assert sent.values == {
        "num_samples": 9,
        "loss": 0.5,
        "withheld": False,
        "processed": ["clip"],
    }
    assert set(sent.arrays) == {
        *("averaged/w", "summed/s", "prototypes/vectors", "prototypes/labels", "prototypes/counts"),
    }
    averaged = reread().averaged
    assert isinstance(averaged, dict)
    assert averaged["w"].tolist() == [1.0, 1.0]
    assert {name: value.tolist() for name, value in reread().summed.items()} == {"s": [0.0]}
    assert (reread().loss, reread().processed, reread().num_samples) == (0.5, ("clip",), 9)
    withheld = pack_update(replace(UPDATE, averaged=None))
    assert withheld.values["withheld"] is True
    assert unpack_update("a", withheld).averaged is None
    assert reread(loss=None).loss is None


def test_stack_member_is_written_out_before_sending() -> None:
    class Stack:
        def tensors(self, index: int) -> dict[str, torch.Tensor]:
            return {"w": torch.tensor([float(index)])}

    stack: Any = Stack()
    sent = pack_update(replace(UPDATE, averaged=StackMember(stack, 3)))
    assert sent.arrays["averaged/w"].tolist() == [3.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_samples": 9.0}, "^num_samples is 9.0; it must be of type int$"),
        ({"loss": 1}, "^loss is 1; it must be of type float$"),
        ({"withheld": 0}, "^withheld is 0; it must be of type bool$"),
        ({"processed": "clip"}, "^processed is 'clip'; it must be of type list$"),
        ({"processed": ["clip", 5]}, "^processed must be a list of names$"),
    ],
)
def test_malformed_update_values_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        reread(**changes)


@pytest.mark.parametrize("part", ["vectors", "labels", "counts"])
def test_malformed_prototypes_are_rejected(part: str) -> None:
    sent = pack_update(UPDATE)
    key = f"prototypes/{part}"
    without = {name: array for name, array in sent.arrays.items() if name != key}
    for arrays in (without, {**without, key: numpy.zeros(7)}):
        with pytest.raises(MessageError, match=r"^prototypes cannot be read \("):
            unpack_update("a", Message(sent.values, arrays))


def test_broadcast_is_packed_as_named_values_and_arrays() -> None:
    pool = PrototypePool.gather({"b": ROWS}, num_classes=2)
    sent = pack_broadcast(Broadcast(3, {"w": torch.ones(1)}, {"c": torch.zeros(2)}, pool))
    assert sent.values == {"round": 3, "names": ["b"]}
    assert set(sent.arrays) == {
        *("params/w", "extra/c", "pool/vectors", "pool/labels", "pool/counts", "pool/owners"),
    }
    found = unpack_broadcast(sent, 2, 4)
    assert (found.round, found.pool.names, found.pool.num_prototypes) == (3, ("b",), 4)
    assert found.pool.num_classes == 2
    assert (found.params["w"].tolist(), found.extra["c"].tolist()) == ([1.0], [0.0, 0.0])
    for values in ({"round": 3.0}, {"names": "b"}, {"names": ["b", "c", "d"], "round": None}):
        with pytest.raises(MessageError, match=r"must be of type|the pool cannot be read"):
            unpack_broadcast(Message({**sent.values, **values}, sent.arrays), 2, 4)
    odd = numpy.zeros(2, numpy.complex128)
    for part in ("vectors", "labels", "counts", "owners"):
        with pytest.raises(MessageError, match=r"^the pool cannot be read \("):
            unpack_broadcast(Message(sent.values, {**sent.arrays, f"pool/{part}": odd}), 2, 4)


def test_server_paths_are_not_sent(tmp_path: Path) -> None:
    experiment = Experiment(method="fedavg", track=("tensorboard",), track_to=tmp_path).replace(
        dataset__root=tmp_path, encoder__name=f"onnx:{tmp_path}/net.onnx", encoder__weights=tmp_path
    )
    document = pack_experiment(experiment)
    assert str(tmp_path) not in document
    found = Experiment.parse_toml(document, Path("x"))
    assert found.encoder.name == "onnx:net.onnx"
    assert (found.dataset.root, found.encoder.weights, found.track_to) == (None, None, None)
    assert found.track == ()
    plain = Experiment.parse_toml(pack_experiment(Experiment(method="fedavg")), Path("x"))
    assert plain.encoder.name == "none"
    assert plain.prototypes.per_class is not None
    assert json.loads(plain.model_dump_json())["method"] == "fedavg"
