"""Processes of one machine: what they exchange lies in memory that they share.

The leader starts the others and has a socket to each. Through it they tell each other how much they
write and when they have; what they write is in two files without a name that all have mapped. So a
sum over processes costs little more than reading it, and nobody else can reach any of this.
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mpfedcl.core.errors import LostWorker
from mpfedcl.engines.handover import Handover
from mpfedcl.engines.heartbeat import Heartbeat
from mpfedcl.engines.process_group import LEAST_TO_BEGIN, MEMBERSHIP, ProcessGroup
from mpfedcl.engines.shared_memory import Line, SharedMemory, SharedSigns, as_numbers

_COMMON_FILES = 3
"""Two to exchange by, and one for signs of life."""
_MOST_DESCRIPTORS = 8
"""That a process is sent: the common files, and a connection and a file for each neighbor."""
LOST_ANOTHER = 3
"""The code that a worker ends with when another process is gone."""
_ENDING_SECONDS = 2.0
"""That a process is given to end whose line is closed."""


class LocalGroup(ProcessGroup):
    """This process among those of its machine."""

    def __init__(
        self, rank: int, heartbeat: Heartbeat, lines: Sequence[Line], memory: Sequence[SharedMemory]
    ) -> None:
        """`lines` lead to all other processes, or from one of them to the leader."""
        super().__init__(rank, len(lines) + 1, heartbeat)
        self._lines = lines
        self._memory = tuple(memory)

    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the leader's bytes in every process."""
        return self.gather(content if self.is_leader else b"")[0]

    def gather(self, content: bytes) -> list[bytes]:
        """Return every process's bytes in every process, in order of rank."""

        def write(place: memoryview) -> None:
            place[:] = content

        return [bytes(each) for each in self._exchange(len(content), write)]

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum of what all processes have, each summing a share of the numbers."""
        dtype, size = values[0].dtype, sum(value.nbytes for value in values)

        def write(place: memoryview) -> None:
            torch.cat(list(values), out=as_numbers(place, dtype))

        summands = [as_numbers(each, dtype) for each in self._exchange(size, write)]
        first, *others = (each.tensor_split(self.size)[self.rank] for each in summands)

        def write_share(place: memoryview) -> None:
            share = as_numbers(place, dtype).copy_(first)
            for other in others:
                share += other

        shares = self._exchange(first.nbytes, write_share)
        return torch.cat([as_numbers(each, dtype) for each in shares])

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
            self._lines[0].write_number(number)
            return form.unpack(self._lines[0].read(form.size))
        numbers = [number, *(line.read_number() for line in self._lines)]
        prepare(numbers)
        for line in self._lines:
            line.write(form.pack(*numbers))
        return numbers

    def _send(self, content: bytes) -> None:
        self._lines[0].write_number(len(content))
        self._lines[0].write(content)

    def _receive(self, rank: int) -> bytes:
        line = self._lines[rank - 1]
        return line.read(line.read_number())


@contextmanager
def start_local_group(size: int, worker: str, timeout: float) -> Iterator[LocalGroup]:
    """Start the other processes of a group, which run a module, and lead them."""
    with ExitStack() as stack:
        files = [_open_file(stack) for _ in range(_COMMON_FILES)]
        lines = [_open_pair(stack) for _ in range(1, size)]
        # Between each process and the next: the ends of the two, and what they share.
        borders = [(*_open_pair(stack), _open_file(stack)) for _ in range(1, size)]
        workers = stack.enter_context(_started([theirs for _, theirs in lines], worker))
        # Before the processes are waited for: then they know that there is nothing left to do.
        ours = stack.enter_context(ExitStack())
        for own, _ in lines:
            ours.enter_context(own)
        for rank, (own, theirs) in enumerate(lines, start=1):
            _, begins, before = borders[rank - 1]
            given = [*(file.fileno() for file in files), begins.fileno(), before.fileno()]
            if rank < size - 1:
                finishes, _, after = borders[rank]
                given += [finishes.fileno(), after.fileno()]
            socket.send_fds(own, [b"!"], given)
            # Whoever has the other end alone closes it by ending.
            theirs.close()
            begins.close()
            if rank > 1:
                borders[rank - 1][0].close()
        connections = [own for own, _ in lines]
        _await(workers, connections, max(timeout, LEAST_TO_BEGIN))
        finishes, _, after = borders[0]
        explain = partial(_name_ended, workers)
        with _member(0, connections, files, range(1, size), timeout, explain) as group:
            group.finishes = Handover(after, Line(finishes, 1, group.heartbeat, explain))
            yield group


@contextmanager
def join_local_group(membership: str, timeout: float) -> Iterator[LocalGroup]:
    """Join the group that this process was started for."""
    descriptor, rank, size = (int(part) for part in membership.split(":"))
    with socket.socket(fileno=descriptor) as line:
        line.set_inheritable(False)
        try:
            said, given, _, _ = socket.recv_fds(line, 1, _MOST_DESCRIPTORS)
            line.send(b"!")
        except OSError:
            said = b""
        if not said:
            raise LostWorker("the leader has ended")
        files = [SharedMemory(each) for each in given[:_COMMON_FILES]]
        neighbors = [
            (socket.socket(fileno=connection), SharedMemory(memory))
            for connection, memory in zip(given[3::2], given[4::2], strict=True)
        ]
        # It ends with its leader, and a leader that is stopped by Ctrl-Z may go on some day.
        with _member(rank, [line] * (size - 1), files, (), timeout) as group:
            before, *after = neighbors
            group.begins = Handover(before[1], Line(before[0], rank - 1, group.heartbeat))
            for connection, memory in after:
                group.finishes = Handover(memory, Line(connection, rank + 1, group.heartbeat))
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
    connections: Sequence[socket.socket],
    files: Sequence[SharedMemory],
    watched: Sequence[int],
    timeout: float,
    explain: Callable[[int], str] = "process {} has ended".format,
) -> Iterator[LocalGroup]:
    *memory, board = files
    heartbeat = Heartbeat(SharedSigns(board, len(connections) + 1), rank, watched, timeout)
    lines = [
        Line(connection, number if rank == 0 else 0, heartbeat, explain)
        for number, connection in enumerate(connections, start=1)
    ]
    try:
        yield LocalGroup(rank, heartbeat, lines, memory)
    finally:
        heartbeat.close()


def _open_file(stack: ExitStack) -> SharedMemory:
    file = SharedMemory.new()
    stack.callback(file.close)
    return file


def _open_pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    first, second = socket.socketpair()
    return stack.enter_context(first), stack.enter_context(second)


@contextmanager
def _started(
    lines: Sequence[socket.socket], worker: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each line; end those that are left."""
    # The leader's modules, from the same places; "" is the folder it was started in.
    places = [str(Path(path).absolute()) for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    size = len(lines) + 1
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, line in enumerate(lines, start=1):
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", worker],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=environment | {MEMBERSHIP: f"{line.fileno()}:{rank}:{size}"},
                    pass_fds=[line.fileno()],
                    # A terminal's Ctrl-C is for the leader, which decides what it means.
                    process_group=0,
                )
            )
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


def _await(
    workers: Sequence[subprocess.Popen[bytes]], lines: Sequence[socket.socket], timeout: float
) -> None:
    """Wait until all processes have begun; one that has ended never will."""
    end = time.monotonic() + timeout
    with selectors.DefaultSelector() as waiting:
        for worker, line in zip(workers, lines, strict=True):
            waiting.register(line, selectors.EVENT_READ, worker)
        while waiting.get_map():
            ready = waiting.select(end - time.monotonic())
            if not ready:
                raise LostWorker(f"it had not begun after {timeout:g} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                if not _has_begun(key.fileobj):
                    key.data.wait()
                    raise LostWorker(f"it ended with code {key.data.returncode} before it began")
                waiting.unregister(key.fileobj)


def _has_begun(line: socket.socket) -> bool:
    try:
        return bool(line.recv(1))
    except ConnectionError:
        return False


def _name_ended(workers: Sequence[subprocess.Popen[bytes]], rank: int) -> str:
    """Say who has ended: who has done so only because another one did is not to blame."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        workers[rank - 1].wait(timeout=_ENDING_SECONDS)
    for number, worker in enumerate(workers, start=1):
        if worker.poll() is not None and worker.returncode != LOST_ANOTHER:
            return f"process {number} has ended"
    return f"process {rank} has ended"
