"""The content of messages: broadcasts, updates and evaluations as named arrays and plain values.

Nothing else travels; `docs/privacy.md` lists it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import numpy
import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.samples import ImageFormat
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import METRICS
from mpfedcl.methods import PREDICTORS, TESTS
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.models.units import hidden_units, mask_params
from mpfedcl.network.transport import Arrays, Message, MessageError, shorten
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.runs.plan import resolve

_LARGEST_INPUT = 2**22
"""Values per sample; the server builds a model of this input size."""
_PROTOTYPES = ("vectors", "labels", "counts")
_POOL = (*_PROTOTYPES, "owners")

SampleKind = Literal["images", "vectors", "tokens"]


def _check_printable(text: str) -> str:
    """Reject text that is unsafe in tables."""
    # Printable text has no lone surrogates, so it can be encoded.
    if not text.isprintable() or len(text.encode()) > 200:
        raise ValueError("it must be printable text of at most 200 bytes")
    return text


# The first error of a long list is enough; a list of all errors would fill the memory.
_FIRST_ERROR = Field(fail_fast=True)
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**40)]
_Counts = Annotated[list[_Count], _FIRST_ERROR]
_Flag = Annotated[bool, Field(strict=True)]
_Metric = Annotated[float, Field(strict=True, ge=0, le=100)]
_Percent = Annotated[float, Field(strict=True, ge=0, le=100)]
_Side = Annotated[int, Field(strict=True, ge=1, le=2**16)]
"""Pixels per side of an image."""
_Text = Annotated[str, AfterValidator(_check_printable)]
_ClassName = Annotated[str, Field(min_length=1), AfterValidator(_check_printable)]


class DataFormat(NamedTuple):
    """The properties of the data that all clients must share."""

    input_size: int
    """Values per sample."""
    encoder: str
    samples: SampleKind = "images"
    image_shape: tuple[int, ...] = ()
    """Set if the model or encoder depends on size and color of the images, and for arrays of more
    than one axis."""
    model: str = ""
    """The fingerprint of a user's own model."""
    embedding_size: int = 0
    """Set if clients have different models."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the data format from the content of federation.json."""
        known = {name: values[name] for name in cls._fields if name in values}
        return cls(**{**known, "image_shape": tuple(known.get("image_shape", ()))})


@dataclass(frozen=True)
class Introduction:
    """A client's description of its data, sent before its first round."""

    name: str
    """The name of the client's key, which is not sent."""
    classes: Annotated[tuple[_ClassName, ...], Field(min_length=1, max_length=10_000), _FIRST_ERROR]
    """The classes that occur in its data."""
    train: Annotated[tuple[_Count, ...], _FIRST_ERROR]
    """Training samples by class; empty under a privacy budget."""
    test: _Count
    """Number of test samples; 0 under a privacy budget."""
    input_size: Annotated[int, Field(strict=True, ge=1, le=_LARGEST_INPUT)]
    """Values per sample."""
    encoder: _Text
    """Fingerprint of its encoder; empty without one."""
    samples: SampleKind
    image_shape: Annotated[tuple[_Side, ...], Field(max_length=3), _FIRST_ERROR]
    """Set if the model or encoder depends on size and color of the images, and for arrays of more
    than one axis."""
    own_data: _Flag
    """Whether the client has its own samples instead of a share of the experiment's data set."""
    model: _Text = ""
    """Fingerprint of its own model; empty for a built-in one."""
    embedding_size: Annotated[int, Field(strict=True, ge=0, le=_LARGEST_INPUT)] = 0
    """Values of an embedding of its model."""

    @property
    def num_samples(self) -> int:
        """Number of training samples; 1 if counts are not sent, so that all weights are equal."""
        return sum(self.train) if self.train else 1

    @property
    def data_format(self) -> DataFormat:
        """The properties of the data that all clients must share."""
        return DataFormat(self.input_size, self.encoder, self.samples, self.image_shape, self.model)

    def to_message(self) -> Message:
        """Return the introduction as a message, without the name."""
        values = _INTRODUCTION.dump_python(self, mode="json", exclude={"name"})
        return Message(values)

    @classmethod
    def from_message(cls, name: str, message: Message) -> "Introduction":
        """Read and check the introduction of a client."""
        found = _parse(_INTRODUCTION, {**message.values, "name": name})
        if len(set(found.classes)) < len(found.classes):
            raise MessageError("classes must be named once each")
        if len(found.train) not in (0, len(found.classes)):
            raise MessageError("train must be a count of images for each class")
        if found.train and sum(found.train) < 1:
            raise MessageError("train must have at least one image")
        shape = found.image_shape
        is_odd = found.samples == "images" and ImageFormat.from_shape(shape) is None
        if shape and (is_odd or math.prod(shape) > _LARGEST_INPUT):
            raise MessageError(
                f"image_shape is {list(shape)}; it must be [height, width] or [height, width, 3] "
                f"of at most {_LARGEST_INPUT} values in total, or []"
            )
        return found


_INTRODUCTION = TypeAdapter(Introduction)
_Content = TypeVar("_Content")


def _parse(schema: TypeAdapter[_Content], values: Mapping[str, Any]) -> _Content:
    """Return the values of a message in a checked form."""
    try:
        return schema.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        raise MessageError(f"{field} is {shorten(first['input'])}: {why}") from None


def pack_experiment(experiment: Experiment) -> str:
    """Return an experiment as TOML for clients, without paths on the server."""
    resolved = resolve(experiment)
    kind, _, path = (resolved.encoder.name or "").partition(":")
    name = f"{kind}:{PurePath(path).name}" if path else resolved.encoder.name
    return resolved.replace(
        dataset__root=None, encoder__weights=None, encoder__name=name, track=(), track_to=None
    ).to_toml()


def pack_broadcast(broadcast: Broadcast) -> Message:
    """Return a broadcast as a message."""
    return Message(
        {
            "round": broadcast.round,
            "names": list(broadcast.pool.names),
            **name_dispatch(broadcast),
        },
        {
            **_to_arrays("params", broadcast.params),
            **_to_arrays("extra", broadcast.extra),
            **_to_arrays("pool", {each: getattr(broadcast.pool, each) for each in _POOL}),
        },
    )


def unpack_broadcast(message: Message, num_classes: int, num_prototypes: int | None) -> Broadcast:
    """Read a broadcast and check its prototype pool."""
    parts = message.tensors("pool")
    try:
        names = tuple(message.value("names", list))
        vectors, labels, counts, owners = (parts[each] for each in _POOL)
        pool = PrototypePool(vectors, labels, counts, owners, names, num_classes, num_prototypes)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise MessageError(f"the pool cannot be read ({error})") from None
    numbers = ("version", "dispatch") if "dispatch" in message.values else ()
    return Broadcast(
        message.value("round", int),
        message.tensors("params"),
        message.tensors("extra"),
        pool,
        **{name: message.value(name, int) for name in numbers},
    )


def name_dispatch(broadcast: Broadcast) -> dict[str, int]:
    """Return the version and dispatch number that an asynchronous client's answer repeats."""
    if broadcast.dispatch is None or broadcast.version is None:
        return {}
    return {"version": broadcast.version, "dispatch": broadcast.dispatch}


def pack_update(update: Update) -> Message:
    """Return an update as a message."""
    averaged = update.written_out().averaged
    assert not isinstance(averaged, StackMember)
    return Message(
        {
            "num_samples": update.num_samples,
            "loss": update.loss,
            "withheld": averaged is None,
            "processed": list(update.processed),
        },
        {
            **_to_arrays("averaged", averaged or {}),
            **_to_arrays("summed", update.summed),
            **_to_arrays("coding", update.coding),
            **_to_arrays("prototypes", {n: getattr(update.prototypes, n) for n in _PROTOTYPES}),
        },
    )


def unpack_update(client: str, message: Message) -> Update:
    """Read a client's update; update validation checks its values later."""
    parts = message.tensors("prototypes")
    try:
        prototypes = Prototypes(*(parts[each] for each in _PROTOTYPES))
    except (KeyError, ValueError) as error:
        raise MessageError(f"prototypes cannot be read ({error})") from None
    processed = message.value("processed", list)
    if not all(isinstance(each, str) for each in processed):
        raise MessageError("processed must be a list of names")
    loss = None if message.values.get("loss") is None else message.value("loss", float)
    return Update(
        client,
        message.value("num_samples", int),
        None if message.value("withheld", bool) else message.tensors("averaged"),
        prototypes,
        loss,
        message.tensors("summed"),
        tuple(processed),
        coding=message.tensors("coding"),
    )


def pack_part(arrays: Arrays, broadcast: Broadcast, client: str, *, is_whole: bool) -> Arrays:
    """Return the arrays of a broadcast for a client that may train a part of the model.

    A part travels as its own parameters and a bit per hidden unit. With `is_whole` the whole model
    travels, because the client evaluates the previous round.
    """
    units = broadcast.units.get(client)
    if units is None:
        return arrays
    bits = {f"units/{each}": numpy.packbits(mask.cpu().numpy()) for each, mask in units.items()}
    if is_whole:
        return {**arrays, **bits}
    masks = mask_params(broadcast.params, units)
    kept = {n: value[masks[n]].detach().cpu().numpy() for n, value in broadcast.params.items()}
    return {**arrays, **{f"params/{name}": value for name, value in kept.items()}, **bits}


def unpack_part(broadcast: Broadcast, message: Message, client: str, like: Tensors) -> Broadcast:
    """Return a broadcast whose part of the model is laid out in full shapes, with zeros elsewhere.

    `like` are parameters of the full model.
    """
    bits = message.tensors("units")
    if not bits:
        return broadcast
    sizes, units = hidden_units(like), dict[str, Tensor]()
    for layer, packed in bits.items():
        size = sizes.get(layer, 0)
        if packed.dtype != torch.uint8 or packed.shape != (-(-size // 8),):
            raise MessageError(f"units of {layer[:80]!r} must be a bit for each of {size}")
        mask = torch.from_numpy(numpy.unpackbits(packed.cpu().numpy(), count=size)).bool()
        units[layer] = mask.to(like[f"{layer}.weight"].device)
    masks = mask_params({name: like[name] for name in broadcast.params if name in like}, units)
    params = {
        name: _lay_out(name, value, masks[name], torch.zeros_like(like[name]))
        if name in masks and value.shape != like[name].shape
        else value
        for name, value in broadcast.params.items()
    }
    return replace(broadcast, params=params, units={client: units})


def pack_part_update(update: Update, broadcast: Broadcast) -> Update:
    """Return an update with only the parameters of the client's part, flattened."""
    masks, averaged = _open_part(update, broadcast)
    if not masks:
        return update
    return replace(
        update, averaged={n: v[masks[n]] if n in masks else v for n, v in averaged.items()}
    )


def unpack_part_update(update: Update, broadcast: Broadcast) -> Update:
    """Return a client's update in full shapes, with the server's values outside its part."""
    masks, averaged = _open_part(update, broadcast)
    if not masks:
        return update
    sent = {n: value.to(masks[n].device) for n, value in averaged.items() if n in masks}
    filled = {n: _lay_out(n, v, masks[n], broadcast.params[n]) for n, v in sent.items()}
    left_out = sum(int((~masks[name]).sum()) for name in filled)
    return replace(update, averaged={**averaged, **filled}, left_out=left_out)


def _lay_out(name: str, sent: Tensor, mask: Tensor, rest: Tensor) -> Tensor:
    """Return `rest` with the values of a part scattered into the mask."""
    wanted = int(mask.sum())
    if sent.shape != (wanted,) or sent.dtype != rest.dtype:
        raise MessageError(
            f"{name[:80]!r} has shape {list(sent.shape)} and type {sent.dtype}; this part must "
            f"have {wanted} values of {rest.dtype}"
        )
    return rest.masked_scatter(mask, sent)


def _open_part(update: Update, broadcast: Broadcast) -> tuple[Tensors, Tensors]:
    """Return the masks of a client's part and its tensors; empty if it trains the whole model."""
    units = broadcast.units.get(update.client)
    if units is None or update.averaged is None:
        return {}, {}
    assert not isinstance(update.averaged, StackMember)
    return mask_params(broadcast.params, units), update.averaged


@dataclass(frozen=True)
class ReportedEvaluation:
    """A client's evaluation of the previous round, sent with its next update.

    Only the client has its test samples, so the evaluation arrives one round late.
    """

    table: dict[str, dict[str, _Percent | None]]
    is_personal: _Flag
    """Whether the client trained in that round, so that its personal predictors count."""
    confusion: Annotated[list[_Counts], _FIRST_ERROR] | None = None
    metrics: dict[str, _Metric | None] | None = None
    """Of the primary predictor, together with the confusion."""


_EVALUATION = TypeAdapter(ReportedEvaluation)


def unpack_evaluation(values: Mapping[str, Any], num_classes: int) -> ReportedEvaluation:
    """Read and check a client's evaluation: percentages, and counts of samples."""
    table: Any = values.get("table")
    try:
        known = {test: {r: table[test].get(r) for r in PREDICTORS} for test in TESTS}
    except (TypeError, KeyError, AttributeError):
        raise MessageError("table must be a table by test set and predictor") from None
    if isinstance(metrics := values.get("metrics"), Mapping):
        metrics = {name: metrics.get(name) for name in METRICS}
    found = _parse(_EVALUATION, {**values, "table": known, "metrics": metrics})
    rows, width = found.confusion, num_classes + 1
    if rows is not None and (len(rows) != num_classes or any(len(e) != width for e in rows)):
        raise MessageError(f"confusion must be [{num_classes}][{width}] counts")
    return found


def gather_evaluations(reported: Mapping[str, ReportedEvaluation]) -> RoundEvaluation | None:
    """Join the evaluations of all clients in name order; None if there are none."""
    if not reported:
        return None
    return RoundEvaluation.of_tables(
        {name: reported[name].table for name in sorted(reported)},
        [name for name in sorted(reported) if reported[name].is_personal],
        {n: counts for n in sorted(reported) if (counts := reported[n].confusion) is not None},
        {n: dict(values) for n in sorted(reported) if (values := reported[n].metrics) is not None},
    )


def _to_arrays(group: str, tensors: Mapping[str, Tensor]) -> Arrays:
    return {f"{group}/{name}": each.detach().cpu().numpy() for name, each in tensors.items()}
