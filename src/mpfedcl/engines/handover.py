"""A client that two processes train: what the one has begun lies where the other can finish it."""

import struct
from collections.abc import Callable

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.direct import Begun
from mpfedcl.engines.shared_memory import Line, SharedMemory, as_numbers

_FORM = struct.Struct("<qqdd")


class Handover:
    """One end of what two neighboring processes share."""

    def __init__(self, memory: SharedMemory, line: Line) -> None:
        self._memory = memory
        self._line = line

    def give(
        self, round_number: int, like: Tensors, begin: Callable[[tuple[Tensors, Tensors]], Begun]
    ) -> None:
        """Begin a client's training in the memory that is shared, and say how far it has come."""
        self._memory.reserve(_sizes(like))
        begun = begin(self._places(like))
        self._line.write(_FORM.pack(round_number, begun.num_steps, begun.scale, begun.loss))

    def take(self, round_number: int, like: Tensors) -> tuple[Begun, tuple[Tensors, Tensors]]:
        """Wait for what was begun: how far it has come, its parameters and their velocity."""
        number, *begun = _FORM.unpack(self._line.read(_FORM.size))
        # Both run the same rounds; what is left of another one must never be taken for this one's.
        assert number == round_number, (number, round_number)
        return Begun(*begun), self._places(like)

    def _places(self, like: Tensors) -> tuple[Tensors, Tensors]:
        places = self._memory.places(_sizes(like))
        found = [
            as_numbers(place, value.dtype).view(value.shape)
            for place, value in zip(places, [*like.values()] * 2, strict=True)
        ]
        half = len(like)
        params, velocity = (
            dict(zip(like, some, strict=True)) for some in (found[:half], found[half:])
        )
        return params, velocity


def _sizes(like: Tensors) -> list[int]:
    return [value.nbytes for value in like.values()] * 2
