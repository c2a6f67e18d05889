"""Answers that no honest client sends, by name, with the recorded reason of each."""

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from federations import records_of, rewrite
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage

from mpfedcl.network.transport import Arrays
from small_experiments import Json

BadReply = Callable[[FlowerMessage, FlowerMessage], FlowerMessage | list[FlowerMessage] | None]
"""(request, reply) -> what is sent instead."""

WEIGHT = "averaged/hidden.1.weight"


def values(**changes: Any) -> BadReply:
    return lambda request, reply: rewrite(reply, request, values=lambda v: {**v, **changes})


def without(name: str) -> BadReply:
    def drop(found: Json) -> Json:
        return {key: each for key, each in found.items() if key != name}

    return lambda request, reply: rewrite(reply, request, values=drop)


def arrays(change: Callable[[Arrays], Mapping[str, Any] | Array]) -> BadReply:
    return lambda request, reply: rewrite(reply, request, arrays=change)


def weight(change: Callable[[Any], Any]) -> BadReply:
    return arrays(lambda found: {**found, WEIGHT: change(found[WEIGHT])})


def rows(part: str, change: Callable[[Any], Any]) -> BadReply:
    key = f"prototypes/{part}"
    return arrays(lambda found: {**found, key: change(found[key])})


def text(content: str) -> BadReply:
    return lambda request, _: FlowerMessage(records_of(content, {}), reply_to=request)


def records(content: Mapping[str, Any]) -> BadReply:
    return lambda request, _: FlowerMessage(RecordDict({**content}), reply_to=request)


def error(code: int, reason: str) -> BadReply:
    return lambda request, _: FlowerMessage(Error(code, reason), reply_to=request)


def packed(data: bytes, kind: str = "safetensors") -> BadReply:
    """Send these bytes in place of all arrays."""
    return arrays(lambda _: Array("uint8", (len(data),), kind, data))


def claim(shape: object, dtype: str = "F64", places: object = (0, 8)) -> BadReply:
    """Send one array of eight bytes with this description."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": places}
    listed = json.dumps({WEIGHT: entry}).encode()
    return packed(len(listed).to_bytes(8, "little") + listed + bytes(8))


def _pickled() -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


def _archived() -> bytes:
    file = io.BytesIO()
    numpy.savez(file, a=numpy.zeros(3))
    return file.getvalue()


def predictor(table: object, confusion: object = None, is_personal: object = True) -> Json:
    return {"late": {"table": table, "is_personal": is_personal, "confusion": confusion}}


def table(value: object) -> Json:
    return {test: {"global_classifier": value} for test in ("local_test", "global_test")}


NOT_FINITE = "values that are not finite"
UNREADABLE = "its answer cannot be read: "

BAD_UPDATES: dict[str, tuple[BadReply, str]] = {
    "NaN": (weight(lambda w: w * float("nan")), NOT_FINITE),
    "infinity": (weight(lambda w: w + float("inf")), NOT_FINITE),
    "far away": (weight(lambda w: w + 1e30), "the model changed by"),
    "1e15 samples": (values(num_samples=10**15), "num_samples is 1000000000000000; this client"),
    "negative samples": (values(num_samples=-5), "num_samples is -5; this client has"),
    "samples as a fraction": (values(num_samples=3.0), "num_samples is 3.0; it must be of type"),
    "samples as a truth": (values(num_samples=True), "num_samples is True; it must be of type"),
    "samples as a text": (values(num_samples="3"), "num_samples is '3'; it must be of type int"),
    "samples without end": (values(num_samples=10**4000), "num_samples is 1000"),
    "no samples": (without("num_samples"), "num_samples is None; it must be of type int"),
    "NaN loss": (values(loss=float("nan")), "loss is nan; it must be finite"),
    "a loss that overflows the mean": (values(loss=1.7e308), r"loss is 1.7e\+308; at most 1e\+12"),
    "an archive of arrays": (packed(_archived()), "its arrays cannot be read"),
    "loss as a list": (values(loss=[1.0]), r"loss is \[1.0\]; it must be of type float"),
    "another shape": (weight(lambda w: w[:1]), r"has shape \[1, 24\]; expected \[12, 24\]"),
    "a scalar": (weight(lambda w: w.sum()), r"has shape \[\]; expected"),
    "another type": (weight(lambda w: w.astype("f4")), "has type torch.float32; expected"),
    "complex": (weight(lambda w: w.astype("c8")), "has type torch.complex64; expected"),
    "another name": (
        arrays(lambda found: {k.replace(WEIGHT, "averaged/x"): v for k, v in found.items()}),
        r"tensors \['hidden.1.weight', 'x'\] are missing or unknown",
    ),
    "a name of a megabyte": (
        arrays(lambda found: {**found, f"averaged/{'a' * 10**6}": numpy.zeros(1)}),
        "it is too large: the header of its arrays has more than",
    ),
    "nothing at all": (records({}), UNREADABLE + "the record 'values' is missing"),
    "no arrays": (
        records({"values": ConfigRecord({"json": "{}"})}),
        UNREADABLE + "the record 'arrays' is missing",
    ),
    "values as a number": (
        records({"values": ConfigRecord({"json": 5}), "arrays": ArrayRecord({})}),
        UNREADABLE + "its values are not text",
    ),
    "no JSON": (text("{'num_samples': 3}"), UNREADABLE + "its values cannot be read"),
    "a list": (text("[1, 2]"), UNREADABLE + "its values are not a table"),
    "depth without end": (text("[" * 200_000), UNREADABLE + "its values cannot be read"),
    "objects": (packed(_pickled()), "its arrays cannot be read"),
    "pickled bytes": (packed(b"\x80\x04K\x01."), "its arrays cannot be read"),
    "no bytes": (packed(b""), "its arrays cannot be read"),
    "terabytes claimed": (claim([10**12]), r"cannot be read \(SafetensorError\)"),
    "terabytes that lie elsewhere": (claim([10**12], places=[0, 8 * 10**12]), "cannot be read"),
    "numbers beyond counting": (claim([2**40, 2**40]), r"cannot be read \(SafetensorError\)"),
    "less than nothing": (claim([-1]), r"cannot be read \(SafetensorError\)"),
    "nothing, very wide": (claim([0, 2**62], places=[0, 0]), r"\(SafetensorError\)"),
    "an unknown type": (claim([1], "object"), r"cannot be read \(SafetensorError\)"),
    "a type of eight bits": (claim([8], "F8_E4M3"), r"cannot be read \(KeyError\)"),
    "another framework": (packed(b"", "torch.Tensor"), "stored as 'torch.Tensor'; it must be"),
    "label beyond classes": (rows("labels", lambda x: x + 99), r"labels must lie in 0\.\.2"),
    "negative label": (rows("labels", lambda x: x - 99), r"labels must lie in 0\.\.2"),
    "labels as fractions": (rows("labels", lambda x: x * 1.0), "prototypes cannot be read"),
    "count of nothing": (rows("counts", lambda x: x * 0), "counts must be at least 1"),
    "count of too much": (rows("counts", lambda x: x + 1000), "sum to at most"),
    "counts beyond int64": (rows("counts", lambda x: x * 0 + 2**62), "sum to at most"),
    "long prototypes": (rows("vectors", lambda x: x * 1000), "a prototype has norm"),
    "NaN prototypes": (rows("vectors", lambda x: x * float("nan")), NOT_FINITE),
    "narrow prototypes": (rows("vectors", lambda x: x[:, :3]), "vectors has shape"),
    "flat prototypes": (rows("vectors", lambda x: x.ravel()), "prototypes cannot be read"),
    "many prototypes": (
        arrays(
            lambda found: {
                **found,
                "prototypes/vectors": numpy.zeros((3, 12)),
                "prototypes/labels": numpy.zeros(3, dtype="i8"),
                "prototypes/counts": numpy.ones(3, dtype="i8"),
            }
        ),
        "a class has 3 prototypes; at most 2",
    ),
    "no prototypes": (
        arrays(lambda found: {k: v for k, v in found.items() if not k.startswith("prototypes")}),
        "prototypes cannot be read",
    ),
    "withheld, by a method that never does": (values(withheld=True), "this method never does"),
    "withheld, in words": (values(withheld="no"), "withheld is 'no'; it must be of type bool"),
    "unknown processor": (values(processed=["magic"]), "processed by 'magic'"),
    "processed, as numbers": (values(processed=[1]), "must be a list of names"),
    "sums without a request": (
        arrays(lambda found: {**found, "summed/x": numpy.zeros(3)}),
        r"\['x'\] are missing or unknown",
    ),
    "an error": (error(2, "it raised"), "it raised"),
    "an error in red": (error(400, "a\n\x1b[31mb\x00"), r"a \[31mb$"),
    "an error without words": (error(1, ""), "Flower's error 1"),
    "an error without end": (error(400, "x" * 10**6), "x{300}$"),
    "an unknown error": (error(9999, "new"), "new"),
}
"""The answer in a round, and the reason in the record's `rejected`."""

PERCENT = r"table\.local_test\.[a-z_]+ is "
BAD_READINGS: dict[str, tuple[BadReply, str]] = {
    "above 100 %": (values(**predictor(table(100.5))), PERCENT + r"100\.5: "),
    "a number without end": (values(**predictor(table(10**400))), PERCENT + "1000"),
    "below 0 %": (values(**predictor(table(-1))), PERCENT + "-1: "),
    "NaN %": (values(**predictor(table(float("nan")))), PERCENT + "nan: "),
    "text %": (values(**predictor(table("99"))), PERCENT + "'99': "),
    "true %": (values(**predictor(table(True))), PERCENT + "True: "),
    "no table": (values(**predictor(None)), "must be a table by test set and predictor"),
    "half a table": (
        values(**predictor({"local_test": {}})),
        "must be a table by test set and predictor",
    ),
    "lists": (
        values(**predictor({"local_test": [], "global_test": []})),
        "must be a table by test set and predictor",
    ),
    "no truth": (values(**predictor(table(5), is_personal=1)), "is_personal is 1: "),
    "no reading": (values(late=[1]), r"late is \[1\]; it must be of type dict"),
    "wrong confusions": (values(**predictor(table(5), [[1, 2], [3, 4]])), r"must be \[3\]\[4\]"),
    "ragged confusions": (values(**predictor(table(5), [[1] * 4, [1], [1] * 4])), r"be \[3\]\[4\]"),
    "flat confusions": (
        values(**predictor(table(5), [1, 2, 3])),
        r"confusion\.0 is 1: ",
    ),
    "negative confusions": (
        values(**predictor(table(5), [[-1] * 4] * 3)),
        r"confusion\.0\.0 is -1: ",
    ),
    "broken confusions": (
        values(**predictor(table(5), [[0.5] * 4] * 3)),
        r"confusion\.0\.0 is 0\.5: ",
    ),
    "endless confusions": (
        values(**predictor(table(5), [[10**30] * 4] * 3)),
        r"confusion\.0\.0 is 10{30}: ",
    ),
}
"""The evaluation of the previous round, with the second round's answer or at the end."""
