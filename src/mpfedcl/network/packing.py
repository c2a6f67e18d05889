"""What is in a message: broadcasts and updates as named arrays and plain values, and back.

This is all that travels, so it is all that `docs/privacy.md` has to tell of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Self

import torch
from numpy.typing import NDArray

from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, LateReading, Table, Update
from mpfedcl.methods import READINGS
from mpfedcl.models import Tensors
from mpfedcl.network.message import Arrays, Parcel, ParcelError, shorten
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.evaluation import TESTS

_MOST_CLASSES = 10_000
_LARGEST_INPUT = 2**22
"""Numbers that stand for an image: the server makes a model for so many."""


@dataclass(frozen=True)
class Introduction:
    """What a client says of itself before it takes part."""

    name: str
    classes: tuple[str, ...]
    """The classes that its data know of."""
    train: tuple[int, ...]
    """Training images by class."""
    test: int
    """Test images."""
    input_size: int
    """Numbers that stand for one image."""
    encoder: str
    """What tells its encoder from others; empty without one."""

    @property
    def num_samples(self) -> int:
        """Training images in all."""
        return sum(self.train)

    @property
    def form(self) -> tuple[int, str]:
        """What all clients must have in common."""
        return self.input_size, self.encoder

    def pack(self) -> Parcel:
        """Return it as a parcel."""
        return Parcel(
            {
                "name": self.name,
                "classes": list(self.classes),
                "train": list(self.train),
                "test": self.test,
                "input_size": self.input_size,
                "encoder": self.encoder,
            }
        )

    @classmethod
    def unpack(cls, parcel: Parcel) -> Self:
        """Read what a client sent; nothing in it is taken on trust."""
        name, encoder = parcel.value("name", str), parcel.value("encoder", str)
        classes, train = parcel.value("classes", list), parcel.value("train", list)
        test, input_size = parcel.value("test", int), parcel.value("input_size", int)
        check_name(name)
        if not (0 < len(classes) <= _MOST_CLASSES and all(_is_plain(each) for each in classes)):
            raise ParcelError("classes must be the names of the classes: printable, not too long")
        if len(set(classes)) < len(classes):
            raise ParcelError("classes must be named once each")
        if len(train) != len(classes) or not all(type(n) is int and 0 <= n < 2**40 for n in train):
            raise ParcelError("train must be a count of images for each class")
        if sum(train) < 1:
            raise ParcelError("it has no image to train on")
        if not (0 <= test < 2**40 and 1 <= input_size <= _LARGEST_INPUT):
            raise ParcelError(f"test is {test} and input_size {input_size}, which makes no sense")
        if encoder and not _is_plain(encoder):
            raise ParcelError("encoder must be a short text")
        return cls(name, tuple(classes), tuple(train), test, input_size, encoder)


def check_name(name: str) -> None:
    """Refuse names that cannot name files, and those that could be mistaken for a path."""
    if not _is_plain(name) or name.startswith(".") or {"/", "\\"} & set(name):
        raise ParcelError(
            f"the name is {shorten(name)}; it must be printable text of at most 200 bytes without "
            "slashes that does not begin with a dot"
        )


def pack_experiment(experiment: Experiment) -> str:
    """Return an experiment as it is sent to clients: without the places of the server's files."""
    kind, _, path = (experiment.encoder.name or "").partition(":")
    name = f"{kind}:{PurePath(path).name}" if path else experiment.encoder.name
    return experiment.replace(
        dataset__root=None, encoder__weights=None, encoder__name=name, track=(), track_to=None
    ).to_toml()


def pack_broadcast(broadcast: Broadcast) -> Parcel:
    """Return a broadcast as a parcel; the pool is one array of vectors with its indices."""
    pool = broadcast.pool
    return Parcel(
        {"round": broadcast.round, "names": list(pool.names)},
        {
            **_to_arrays("params", broadcast.params),
            **_to_arrays("extra", broadcast.extra),
            "pool/vectors": _to_array(pool.vectors),
            "pool/labels": _to_array(pool.labels),
            "pool/counts": _to_array(pool.counts),
            "pool/owners": _to_array(pool.owners),
        },
    )


def unpack_broadcast(parcel: Parcel, num_classes: int, num_prototypes: int | None) -> Broadcast:
    """Read a broadcast; a pool that is no pool is refused."""
    parts = parcel.tensors("pool")
    try:
        pool = PrototypePool(
            parts["vectors"],
            parts["labels"],
            parts["counts"],
            parts["owners"],
            tuple(parcel.value("names", list)),
            num_classes,
            num_prototypes,
        )
    except (KeyError, ValueError) as error:
        raise ParcelError(f"the pool cannot be read ({error})") from None
    return Broadcast(
        parcel.value("round", int), parcel.tensors("params"), parcel.tensors("extra"), pool
    )


def pack_update(update: Update) -> Parcel:
    """Return an update as a parcel."""
    assert isinstance(update.sums, dict)
    values: dict[str, Any] = {"num_samples": update.num_samples, "loss": update.loss}
    if update.late is not None:
        values["late"] = pack_reading(update.late)
    rows = update.rows
    return Parcel(
        values,
        {
            **_to_arrays("sums", update.sums),
            "rows/vectors": _to_array(rows.vectors),
            "rows/labels": _to_array(rows.labels),
            "rows/counts": _to_array(rows.counts),
        },
    )


def unpack_update(client: str, parcel: Parcel) -> Update:
    """Read a client's update; whether its numbers are sound is for the guard to say."""
    parts = parcel.tensors("rows")
    try:
        rows = Prototypes(parts["vectors"], parts["labels"], parts["counts"])
    except (KeyError, ValueError) as error:
        raise ParcelError(f"prototypes cannot be read ({error})") from None
    late = unpack_reading(parcel.value("late", dict)) if "late" in parcel.values else None
    return Update(
        client,
        parcel.value("num_samples", int),
        parcel.tensors("sums"),
        rows,
        parcel.value("loss", float),
        late,
    )


def pack_reading(late: LateReading) -> dict[str, Any]:
    """Return a client's reading as plain values."""
    return {"table": late.table, "is_personal": late.is_personal, "confusion": late.confusion}


def unpack_reading(values: Mapping[str, Any]) -> LateReading:
    """Read what a client says of the round before; its numbers are for the guard to judge."""
    table, is_personal = values.get("table"), values.get("is_personal")
    confusion = values.get("confusion")
    try:
        sound: Table = {
            test: {str(reading): _percent(table[test].get(reading)) for reading in READINGS}  # type: ignore[index]
            for test in TESTS
        }
    except (TypeError, KeyError, AttributeError):
        raise ParcelError("a reading must be a table by test and reading") from None
    if type(is_personal) is not bool or not (
        confusion is None
        or (isinstance(confusion, list) and all(isinstance(row, list) for row in confusion))
    ):
        raise ParcelError("a reading must say whether it is personal, and count in rows")
    return LateReading(sound, is_personal, confusion)


def _percent(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else value


def _to_arrays(group: str, tensors: Tensors) -> Arrays:
    return {f"{group}/{name}": _to_array(value) for name, value in tensors.items()}


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _is_plain(text: object) -> bool:
    """Tell whether this is text for a table or a file's name."""
    # Printable text has no lone surrogates, so that it can be encoded.
    return isinstance(text, str) and text.isprintable() and 0 < len(text.encode()) <= 200
