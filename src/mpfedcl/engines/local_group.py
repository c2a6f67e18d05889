"""Processes of one machine: what they exchange lies in memory that they share.

The leader starts the others and has a socket to each. Through it they tell each other how much they
write and when they have; what they write is in two files without a name that all have mapped. So a
sum over processes costs little more than reading it, and nobody else can reach any of this.
"""

import contextlib
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from mpfedcl.engines.heartbeat import LOOK_SECONDS, Heartbeat
from mpfedcl.engines.process_group import LEAST_TO_BEGIN, MEMBERSHIP, ProcessGroup
from mpfedcl.errors import LostWorker
from mpfedcl.tensors import Tensors

_NUMBER_BYTES = 8
_ALIGNMENT = 64
"""Bytes: what a process writes begins at a multiple of it, so that it can be read as numbers."""
_SMALLEST_FILE = 2**20


class LocalGroup(ProcessGroup):
    """This process among those of its machine."""

    def __init__(
        self,
        rank: int,
        heartbeat: Heartbeat,
        lines: Sequence[socket.socket],
        memory: Sequence["SharedMemory"],
    ) -> None:
        """`lines` lead to all other processes, or from one of them to the leader."""
        super().__init__(rank, len(lines) + 1, heartbeat)
        self._lines = lines
        self._memory = tuple(memory)
        for line in lines:
            line.settimeout(LOOK_SECONDS)

    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the leader's bytes in every process."""
        return self.gather(content if self.is_leader else b"")[0]

    def gather(self, content: bytes) -> list[bytes]:
        """Return every process's bytes in every process, in order of rank."""

        def write(place: memoryview) -> None:
            place[:] = content

        return [bytes(each) for each in self._exchange(len(content), write)]

    def sum(self, tensors: Tensors) -> Tensors:
        """Return the sums over all processes, the same bits in each."""
        total: Tensors = {}
        for dtype in dict.fromkeys(value.dtype for value in tensors.values()):
            alike = {name: value for name, value in tensors.items() if value.dtype == dtype}
            flat = self._sum([value.flatten().cpu() for value in alike.values()])
            parts = torch.split(flat, [value.numel() for value in alike.values()])
            for (name, value), part in zip(alike.items(), parts, strict=True):
                total[name] = part.view_as(value).to(value.device)
        return {name: total[name] for name in tensors}

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum of what all processes have, each summing a share of the numbers."""
        dtype, size = values[0].dtype, sum(value.nbytes for value in values)

        def write(place: memoryview) -> None:
            torch.cat(list(values), out=_numbers(place, dtype))

        summands = [_numbers(each, dtype) for each in self._exchange(size, write)]
        first, *others = (each.tensor_split(self.size)[self.rank] for each in summands)

        def write_share(place: memoryview) -> None:
            share = _numbers(place, dtype).copy_(first)
            for other in others:
                share += other

        shares = self._exchange(first.nbytes, write_share)
        return torch.cat([_numbers(each, dtype) for each in shares])

    def _exchange(self, size: int, write: Callable[[memoryview], None]) -> list[memoryview]:
        """Write so many bytes; return what all have written, until the exchange after the next."""
        # The files take turns: who writes into one knows that all have read what it held before,
        # because all have come to the exchange in between.
        memory, other = self._memory
        self._memory = other, memory
        sizes = self._tell(size, memory.reserve)
        places = memory.places(sizes)
        if size:
            write(places[self.rank])
        self._tell(0)
        return places

    def _tell(
        self, number: int, prepare: Callable[[Sequence[int]], None] = lambda _: None
    ) -> Sequence[int]:
        """Return what all processes tell; the leader prepares for it before the others know."""
        form = struct.Struct(f"<{self.size}q")
        if not self.is_leader:
            self._write(0, number.to_bytes(_NUMBER_BYTES, "little"))
            return form.unpack(self._read(0, form.size))
        numbers = [number, *(self._read_number(rank) for rank in range(1, self.size))]
        prepare(numbers)
        for rank in range(1, self.size):
            self._write(rank, form.pack(*numbers))
        return numbers

    def _send(self, content: bytes) -> None:
        self._write(0, len(content).to_bytes(_NUMBER_BYTES, "little"))
        self._write(0, content)

    def _receive(self, rank: int) -> bytes:
        return self._read(rank, self._read_number(rank))

    def _read_number(self, rank: int) -> int:
        return int.from_bytes(self._read(rank, _NUMBER_BYTES), "little")

    def _write(self, rank: int, content: bytes) -> None:
        left = memoryview(content)
        while left:
            done = self._try(rank, lambda line, left=left: line.send(left))  # type: ignore[misc]
            left = left[done:]

    def _read(self, rank: int, size: int) -> bytes:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            done = self._try(rank, lambda line, left=left: line.recv_into(left))  # type: ignore[misc]
            left = left[done:]
        return bytes(content)

    def _try(self, rank: int, move: Callable[[socket.socket], int]) -> int:
        """Return how many bytes a line has moved: some, unless that took too long to wait for."""
        self._heartbeat.begin_to_wait()
        try:
            done = move(self._lines[max(0, rank - 1)])
        except TimeoutError:
            self._heartbeat.look()
            return 0
        except OSError:
            done = 0
        if not done:
            raise LostWorker(f"process {rank} has ended")
        return done


class SharedMemory:
    """A file without a name, in memory, that several processes have open."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
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
        """Make room for so many bytes of each process."""
        needed, now = _starts(sizes)[-1], os.fstat(self.descriptor).st_size
        if needed > now:
            self._grow(max(needed, 2 * now))

    def places(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return where each process writes and is read."""
        starts = _starts(sizes)
        view = self.view(starts[-1])
        return [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def view(self, size: int) -> memoryview:
        """Return the memory, at least so many bytes of it."""
        if self._mapped is None or len(self._mapped) < size:
            # What is still read of the old mapping keeps it alive.
            self._mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return memoryview(self._mapped)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)

    def _grow(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            # Unlike a longer file with a hole, this says at once where there is no memory for it.
            os.posix_fallocate(self.descriptor, 0, size)
        else:
            os.ftruncate(self.descriptor, size)


class SharedSigns:
    """Signs of life in memory that all processes share."""

    def __init__(self, memory: SharedMemory, size: int) -> None:
        self._view = memory.view(size * _NUMBER_BYTES).cast("q")

    def write(self, rank: int, sign: int) -> None:
        """Write down a process's newest sign."""
        self._view[rank] = sign

    def read(self, rank: int) -> int:
        """Return a process's newest sign; 0: there is none yet."""
        return self._view[rank]


@contextmanager
def start_local_group(size: int, worker: str, timeout: float) -> Iterator[LocalGroup]:
    """Start the other processes of a group, which run a module, and lead them."""
    files = [SharedMemory.new() for _ in range(3)]
    pairs = [socket.socketpair() for _ in range(1, size)]
    lines = [own for own, _ in pairs]
    try:
        with _started([theirs for _, theirs in pairs], worker) as workers:
            try:
                for own, theirs in pairs:
                    # Whoever has the other end alone closes it by ending.
                    theirs.close()
                    socket.send_fds(own, [b"!"], [each.descriptor for each in files])
                for rank, line in enumerate(lines, start=1):
                    _await(workers[rank - 1], line, max(timeout, LEAST_TO_BEGIN))
                with _member(0, lines, files, range(1, size), timeout) as group:
                    yield group
            finally:
                for line in lines:
                    line.close()
    finally:
        for file in files:
            file.close()


@contextmanager
def join_local_group(membership: str, timeout: float) -> Iterator[LocalGroup]:
    """Join the group that this process was started for."""
    descriptor, rank, size = (int(part) for part in membership.split(":"))
    with socket.socket(fileno=descriptor) as line:
        line.set_inheritable(False)
        _, descriptors, _, _ = socket.recv_fds(line, 1, 3)
        line.send(b"!")
        files = [SharedMemory(each) for each in descriptors]
        lines = [line] * (size - 1)
        # It ends with its leader, and a leader that is stopped by Ctrl-Z may go on some day.
        with _member(rank, lines, files, (), timeout) as group:
            yield group


def end_with_parent() -> None:
    """End this process when the one that started it is gone: it holds the other end of stdin.

    And not by an interrupt: the leader alone decides what that means.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        # Not through sys.stdin, whose lock this thread would hold when the interpreter ends.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _member(
    rank: int,
    lines: Sequence[socket.socket],
    files: Sequence[SharedMemory],
    watched: Sequence[int],
    timeout: float,
) -> Iterator[LocalGroup]:
    *memory, board = files
    heartbeat = Heartbeat(SharedSigns(board, len(lines) + 1), rank, watched, timeout)
    try:
        yield LocalGroup(rank, heartbeat, lines, memory)
    finally:
        heartbeat.close()


@contextmanager
def _started(
    lines: Sequence[socket.socket], worker: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each line; end those that are left."""
    # The leader's modules, from the same places; "" is the folder it was started in.
    places = [str(Path(path).absolute()) for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    size = len(lines) + 1
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment | {MEMBERSHIP: f"{line.fileno()}:{rank}:{size}"},
            pass_fds=[line.fileno()],
            # A terminal's Ctrl-C is for the leader, which decides what it means.
            process_group=0,
        )
        for rank, line in enumerate(lines, start=1)
    ]
    try:
        yield workers
    finally:
        for process in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
            if process.poll() is None:
                process.kill()
        for process in workers:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _await(worker: subprocess.Popen[bytes], line: socket.socket, timeout: float) -> None:
    """Wait until a process has begun; one that has ended never will."""
    line.settimeout(timeout)
    try:
        has_begun = bool(line.recv(1))
    except TimeoutError:
        raise LostWorker(f"it had not begun after {timeout:g} s") from None
    except ConnectionError:
        has_begun = False
    if not has_begun:
        worker.wait()
        raise LostWorker(f"it ended with code {worker.returncode} before it began")


def _numbers(place: memoryview, dtype: torch.dtype) -> Tensor:
    # Torch reads no buffer of nothing.
    return torch.frombuffer(place, dtype=dtype) if place else torch.empty(0, dtype=dtype)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where what each process writes begins, and where all of it ends."""
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
