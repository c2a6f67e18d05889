"""Memory that several processes of a machine share, and the lines between them."""

import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mpfedcl.core.errors import LostWorker
from mpfedcl.engines.heartbeat import LOOK_SECONDS, Heartbeat

NUMBER_BYTES = 8
_ALIGNMENT = 64
"""Bytes: what is written begins at a multiple of it, so that it can be read as numbers."""
_SMALLEST_FILE = 2**20


class SharedMemory:
    """A file without a name, in memory, that several processes have open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    @classmethod
    def new(cls, size: int = _SMALLEST_FILE) -> "SharedMemory":
        """Return a fresh one."""
        if hasattr(os, "memfd_create"):
            made = cls(os.memfd_create("mpfedcl"))
        else:
            with tempfile.TemporaryFile() as file:
                made = cls(os.dup(file.fileno()))
        made._grow(size)
        return made

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for parts of so many bytes."""
        needed, now = _starts(sizes)[-1], os.fstat(self._descriptor).st_size
        if needed > now:
            self._grow(max(needed, now * 5 // 4))

    def places(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return where each part is written and read."""
        starts = _starts(sizes)
        view = self._view(starts[-1])
        return [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def fileno(self) -> int:
        """Return its number in this process."""
        return self._descriptor

    def close(self) -> None:
        """Let go of it; what is still read of it stays."""
        os.close(self._descriptor)

    def _view(self, size: int) -> memoryview:
        if self._mapped is None or len(self._mapped) < size:
            # What is still read of the old mapping keeps it alive.
            self._mapped = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return memoryview(self._mapped)

    def _grow(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            # Unlike a longer file with a hole, this says at once where there is no memory for it.
            os.posix_fallocate(self._descriptor, 0, size)
        else:
            os.ftruncate(self._descriptor, size)


class SharedSigns:
    """Signs of life in memory that all processes share."""

    def __init__(self, memory: SharedMemory, size: int) -> None:
        (place,) = memory.places([size * NUMBER_BYTES])
        self._signs = place.cast("q")

    def write(self, rank: int, sign: int) -> None:
        """Write down a process's newest sign."""
        self._signs[rank] = sign

    def read(self, rank: int) -> int:
        """Return a process's newest sign; 0: there is none yet."""
        return self._signs[rank]


class Line:
    """A line to another process, for small messages."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        heartbeat: Heartbeat,
        explain: Callable[[int], str] = "process {} has ended".format,
    ) -> None:
        """`explain` says what has become of the process at the other end, once it is gone."""
        connection.settimeout(LOOK_SECONDS)
        self._explain = explain
        self._connection = connection
        self._rank = rank
        self._heartbeat = heartbeat

    def write(self, content: bytes) -> None:
        """Send bytes; raise LostWorker where nobody is left to read them."""
        left = memoryview(content)
        while left:
            left = left[self._try(lambda left=left: self._connection.send(left)) :]  # type: ignore[misc]

    def read(self, size: int) -> bytes:
        """Return so many bytes; raise LostWorker where nobody is left to send them."""
        content = bytearray(size)
        left = memoryview(content)
        while left:
            left = left[self._try(lambda left=left: self._connection.recv_into(left)) :]  # type: ignore[misc]
        return bytes(content)

    def write_number(self, number: int) -> None:
        """Send a number."""
        self.write(number.to_bytes(NUMBER_BYTES, "little"))

    def read_number(self) -> int:
        """Return a number."""
        return int.from_bytes(self.read(NUMBER_BYTES), "little")

    def _try(self, move: Callable[[], int]) -> int:
        """Return how many bytes have moved: some, unless that took too long to wait for."""
        self._heartbeat.begin_to_wait()
        try:
            done = move()
        except TimeoutError:
            self._heartbeat.look()
            return 0
        except OSError:
            done = 0
        if not done:
            raise LostWorker(self._explain(self._rank))
        return done


def as_numbers(place: memoryview, dtype: torch.dtype) -> Tensor:
    """Return memory as a tensor."""
    # Torch reads no buffer of nothing.
    return torch.frombuffer(place, dtype=dtype) if place else torch.empty(0, dtype=dtype)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each part begins, and where all of them end."""
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
