"""What is in a message: broadcasts and updates as named arrays and plain values, and back.

This is all that travels, so `docs/privacy.md` lists it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from numpy.typing import NDArray

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.samples import ImageFormat
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.network.message import Arrays, Message, MessageError, shorten
from mpfedcl.prototypes import PrototypePool, Prototypes

_MOST_CLASSES = 10_000
_LARGEST_INPUT = 2**22
"""Numbers that stand for a sample: the server makes a model for so many."""
_LONGEST_SIDE = 2**16
"""Of an image, in pixels; it is written down, and read by whoever uses the model."""

SampleKind = Literal["images", "vectors"]


class Form(NamedTuple):
    """What all clients must have in common."""

    input_size: int
    """Numbers that stand for a sample."""
    encoder: str
    samples: SampleKind = "images"
    image_shape: tuple[int, ...] = ()
    """Of images whose model or encoder is made for their own size and color; else empty."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read it from federation.json; an older one does not have all fields."""
        known = {name: values[name] for name in cls._fields if name in values}
        return cls(**{**known, "image_shape": tuple(known.get("image_shape", ()))})


@dataclass(frozen=True)
class Introduction:
    """What a client says of itself before it takes part."""

    name: str
    classes: tuple[str, ...]
    """The classes that its data know of."""
    train: tuple[int, ...]
    """Training samples by class; nothing under a privacy budget, where they are not told."""
    test: int
    """Test samples; 0 where they are not told."""
    input_size: int
    """Numbers that stand for one sample."""
    encoder: str
    """What tells its encoder from others; empty without one."""
    samples: SampleKind = "images"
    """What its data are."""
    image_shape: tuple[int, ...] = ()
    """Of one image, where model or encoder is made for images of their own size and color."""
    own_data: bool = False
    """Whether its samples are its own, and no share of the experiment's data set."""

    @property
    def num_samples(self) -> int:
        """Training samples in all; 1 where they are not told, so that all weigh alike."""
        return sum(self.train) if self.train else 1

    @property
    def form(self) -> Form:
        """What all clients must have in common."""
        return Form(self.input_size, self.encoder, self.samples, self.image_shape)

    def to_message(self) -> Message:
        """Return it as a message."""
        return Message(
            {
                "name": self.name,
                "classes": list(self.classes),
                "train": list(self.train),
                "test": self.test,
                "input_size": self.input_size,
                "encoder": self.encoder,
                "samples": self.samples,
                "image_shape": list(self.image_shape),
                "own_data": self.own_data,
            }
        )

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Read what a client sent; nothing in it is trusted."""
        name, encoder = message.value("name", str), message.value("encoder", str)
        classes, train = message.value("classes", list), message.value("train", list)
        test, input_size = message.value("test", int), message.value("input_size", int)
        check_name(name)
        if not (0 < len(classes) <= _MOST_CLASSES and all(_is_plain(each) for each in classes)):
            raise MessageError("classes must be the names of the classes: printable, not too long")
        if len(set(classes)) < len(classes):
            raise MessageError("classes must be named once each")
        if len(train) not in (0, len(classes)) or not all(
            type(n) is int and 0 <= n < 2**40 for n in train
        ):
            raise MessageError("train must be a count of images for each class")
        if train and sum(train) < 1:
            raise MessageError("it has no image to train on")
        if not (0 <= test < 2**40 and 1 <= input_size <= _LARGEST_INPUT):
            raise MessageError(f"test is {test} and input_size {input_size}, which makes no sense")
        if encoder and not _is_plain(encoder):
            raise MessageError("encoder must be a short text")
        # Clients of the first version have images alone, and do not say so.
        samples = message.values.get("samples", "images")
        if samples not in get_args(SampleKind):
            raise MessageError(f"samples is {shorten(samples)}; it must be images or vectors")
        # Nor do older ones have an encoder that is made for the size of their images.
        shape = message.values.get("image_shape", [])
        is_known = ImageFormat.from_shape(shape) is not None and max(shape) <= _LONGEST_SIDE
        if shape != [] and not (is_known and math.prod(shape) <= _LARGEST_INPUT):
            raise MessageError(
                f"image_shape is {shorten(shape)}; it must be [height, width] or "
                f"[height, width, 3] of at most {_LONGEST_SIDE} each, {_LARGEST_INPUT} numbers in "
                "all, or []"
            )
        own_data = message.values.get("own_data", False)
        if type(own_data) is not bool:
            raise MessageError(f"own_data is {shorten(own_data)}; it must be true or false")
        labels, counts, shape = tuple(classes), tuple(train), tuple(shape)
        return cls(name, labels, counts, test, input_size, encoder, samples, shape, own_data)


def check_name(name: str) -> None:
    """Refuse names that cannot name files, and those that could be mistaken for a path."""
    if not _is_plain(name) or name.startswith(".") or {"/", "\\"} & set(name):
        raise MessageError(
            f"the name is {shorten(name)}; it must be printable text of at most 200 bytes without "
            "slashes that does not begin with a dot"
        )


def pack_experiment(experiment: Experiment) -> str:
    """Return an experiment as it is sent to clients: without the places of the server's files."""
    # Where clients decide, those with images are told what an encoder they need.
    resolved = experiment.resolved(find_method(experiment.method).defaults)
    kind, _, path = (resolved.encoder.name or "").partition(":")
    name = f"{kind}:{PurePath(path).name}" if path else resolved.encoder.name
    return resolved.replace(
        dataset__root=None, encoder__weights=None, encoder__name=name, track=(), track_to=None
    ).to_toml()


def pack_broadcast(broadcast: Broadcast) -> Message:
    """Return a broadcast as a message; the pool is one array of vectors with its indices."""
    pool = broadcast.pool
    return Message(
        {"round": broadcast.round, "names": list(pool.names), **name_dispatch(broadcast)},
        {
            **_to_arrays("params", broadcast.params),
            **_to_arrays("extra", broadcast.extra),
            "pool/vectors": _to_array(pool.vectors),
            "pool/labels": _to_array(pool.labels),
            "pool/counts": _to_array(pool.counts),
            "pool/owners": _to_array(pool.owners),
        },
    )


def unpack_broadcast(message: Message, num_classes: int, num_prototypes: int | None) -> Broadcast:
    """Read a broadcast; a pool that is no pool is refused."""
    parts = message.tensors("pool")
    try:
        pool = PrototypePool(
            parts["vectors"],
            parts["labels"],
            parts["counts"],
            parts["owners"],
            tuple(message.value("names", list)),
            num_classes,
            num_prototypes,
        )
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
    """Return what an answer has to repeat, with asynchronous methods: which message it answers."""
    if broadcast.dispatch is None or broadcast.version is None:
        return {}
    return {"version": broadcast.version, "dispatch": broadcast.dispatch}


def pack_update(update: Update) -> Message:
    """Return an update as a message."""
    averaged = update.written_out().averaged
    assert not isinstance(averaged, StackMember)
    prototypes = update.prototypes
    return Message(
        {
            "num_samples": update.num_samples,
            "loss": update.loss,
            "withheld": averaged is None,
            "processed": list(update.processed),
        },
        {
            **_to_arrays("averaged", averaged or {}),
            **_to_arrays("summed", dict(update.summed)),
            **_to_arrays("coding", dict(update.coding)),
            "prototypes/vectors": _to_array(prototypes.vectors),
            "prototypes/labels": _to_array(prototypes.labels),
            "prototypes/counts": _to_array(prototypes.counts),
        },
    )


def unpack_update(client: str, message: Message) -> Update:
    """Read a client's update; the guard checks its numbers."""
    parts = message.tensors("prototypes")
    try:
        prototypes = Prototypes(parts["vectors"], parts["labels"], parts["counts"])
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


def _to_arrays(group: str, tensors: Tensors) -> Arrays:
    return {f"{group}/{name}": _to_array(value) for name, value in tensors.items()}


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _is_plain(text: object) -> bool:
    """Tell whether this is text for a table or a file's name."""
    # Printable text has no lone surrogates, so that it can be encoded.
    return isinstance(text, str) and text.isprintable() and 0 < len(text.encode()) <= 200
