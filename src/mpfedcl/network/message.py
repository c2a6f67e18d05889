"""A message as arrays and plain values, without torch: who only carries it need not load that."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from mpfedcl.core.tensors import Tensors

Arrays = dict[str, NDArray[Any]]
Kind = Literal["hello", "secure", "round", "close"]
"""hello: introduce yourself. secure: a stage of a secure sum beside the round itself. round: train.
close: evaluate the last round."""

FORMAT = 4
"""Of messages; another one is refused: server and clients must be of versions that share it."""
MOST_BYTES = 2**31
"""Of all arrays in a message; what is larger is not opened."""


class MessageError(ValueError):
    """A message that is not what it must be; the text says why."""


@dataclass(frozen=True)
class Message:
    """The content of a message."""

    values: dict[str, Any]
    """Plain values: numbers, texts, lists and tables of them."""
    arrays: Arrays = field(default_factory=dict)

    def value(self, name: str, kind: type[Any]) -> Any:
        """Return a value that must be there and of a type."""
        found = self.values.get(name)
        if type(found) is not kind:
            raise MessageError(f"{name} is {shorten(found)}; it must be of type {kind.__name__}")
        return found

    def tensors(self, group: str) -> "Tensors":
        """Return the arrays of a group, as tensors by name."""
        prefix = f"{group}/"
        found = {n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)}
        return {name: _to_tensor(name, array) for name, array in found.items()}


def to_json(values: Mapping[str, Any]) -> str:
    """Return plain values as text; numbers that are not finite are not among them."""
    return json.dumps(values, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """Read plain values."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"its values cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise MessageError("its values are not a table")
    return values


def shorten(value: object) -> str:
    """Return a value as text that fits a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _to_tensor(name: str, array: NDArray[Any]) -> "torch.Tensor":
    import torch

    # Who calls bytes an array may have sent an archive of several, which numpy opens as such.
    if not isinstance(array, numpy.ndarray):
        raise MessageError(f"{name[:80]!r} is not an array")
    try:
        # A copy: what came over the wire may lie in memory that nobody may write to.
        return torch.from_numpy(numpy.array(array, order="C"))
    except (TypeError, ValueError):
        raise MessageError(f"{name[:80]!r} is of type {array.dtype}, which no tensor has") from None
