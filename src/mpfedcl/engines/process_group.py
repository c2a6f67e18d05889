"""The processes that run one experiment together, on one machine or on many.

A thin layer over torch.distributed: bytes from the leader to all, bytes from all to all, tensors
summed. What travels as bytes is JSON or safetensors, never a pickle.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from mpfedcl.engines.heartbeat import Heartbeat
from mpfedcl.errors import LostWorker
from mpfedcl.tensors import Tensors

_MEMBERSHIP = "MPFEDCL_PROCESS_GROUP"
"""port:rank:size, for processes that this package starts itself."""
_TIMEOUT = timedelta(hours=6)
"""How long an exchange may take, which must outlast any evaluation. Who has ended is noticed at
once, and who hangs by its heartbeat; this is for what is left."""
WORKER_TIMEOUT = 300.0
"""Seconds without a sign of life, for processes that have not been told otherwise yet."""
_LEAST_TO_BEGIN = 120.0
"""Seconds that processes are given at least to begin, before there are signs of life."""
_Result = TypeVar("_Result")
_calls: list[threading.Thread] = []
"""The last call to others, which may still be waiting when this process is interrupted."""


class ProcessGroup:
    """This process's place among those that work together; number 0 leads and records."""

    def __init__(self, rank: int, size: int, heartbeat: Heartbeat) -> None:
        self.rank = rank
        self.size = size
        self._heartbeat = heartbeat

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def expect_signs_within(self, seconds: float) -> None:
        """Take a process for lost that has given no sign of life for so long."""
        self._heartbeat.timeout = seconds

    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the leader's bytes in every process."""
        return self._call(lambda: self._broadcast(content, 0))

    def gather(self, content: bytes) -> list[bytes]:
        """Return every process's bytes in every process, in order of rank."""
        return self._call(lambda: [self._broadcast(content, rank) for rank in range(self.size)])

    def gather_to_leader(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of all processes to the leader, one at a time; others yield nothing."""
        if self.is_leader:
            yield from parts
            for rank in range(1, self.size):
                while part := self._call(lambda rank=rank: self._receive(rank)):  # type: ignore[misc]
                    yield part
        else:
            for part in parts:
                self._call(lambda part=part: self._send(part))  # type: ignore[misc]
            self._call(lambda: self._send(b""))

    def sum(self, tensors: Tensors) -> Tensors:
        """Return the sums over all processes, the same bits in each."""
        total: Tensors = {}
        for dtype in dict.fromkeys(value.dtype for value in tensors.values()):
            alike = {name: value for name, value in tensors.items() if value.dtype == dtype}
            flat = torch.cat([value.flatten() for value in alike.values()]).cpu()
            self._call(lambda flat=flat: dist.all_reduce(flat))  # type: ignore[misc]
            parts = torch.split(flat, [value.numel() for value in alike.values()])
            for (name, value), part in zip(alike.items(), parts, strict=True):
                total[name] = part.view_as(value).to(value.device)
        return {name: total[name] for name in tensors}

    def wait(self) -> None:
        """Go on when all processes have come here."""
        self.gather(b"")

    def _call(self, call: Callable[[], _Result]) -> _Result:
        return _call(call, self._heartbeat.wait)

    def _broadcast(self, content: bytes, source: int) -> bytes:
        size = torch.tensor([len(content)])
        dist.broadcast(size, source)
        if not int(size):
            return b""
        buffer = _as_tensor(content) if self.rank == source else _empty(int(size))
        dist.broadcast(buffer, source)
        return content if self.rank == source else buffer.numpy().tobytes()

    def _send(self, content: bytes) -> None:
        dist.send(torch.tensor([len(content)]), 0)
        if content:
            dist.send(_as_tensor(content), 0)

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank)
        buffer = _empty(int(size))
        if int(size):
            dist.recv(buffer, rank)
        return buffer.numpy().tobytes()


@contextmanager
def open_process_group(
    num_workers: int, worker: str, timeout: float = WORKER_TIMEOUT
) -> Iterator[ProcessGroup | None]:
    """Join the group that this process was started in, or start one; None for a process alone.

    `worker` is the module that the other processes run; `timeout` the seconds after which one that
    gives no sign of life is taken for lost.
    """
    if _MEMBERSHIP in os.environ:
        port, rank, size = (int(part) for part in os.environ[_MEMBERSHIP].split(":"))
        store = TCPStore("127.0.0.1", port, size, False, _TIMEOUT)
        store.set(f"here/{rank}", "yes")
        # It ends with its leader, and a leader that is stopped by Ctrl-Z may go on some day.
        with _member(rank, size, store, (), timeout) as group:
            yield group
    elif is_under_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with _member(rank, size, None, range(1, size) if rank == 0 else (0,), timeout) as group:
            yield group
    elif num_workers > 1:
        with (
            _open_store(num_workers) as store,
            _started(num_workers, store.port, worker) as workers,
        ):
            _await(workers, store, max(timeout, _LEAST_TO_BEGIN))
            with _member(0, num_workers, store, range(1, num_workers), timeout) as group:
                yield group
    else:
        yield None


def is_under_torchrun() -> bool:
    """Tell whether torchrun has started this process together with others."""
    # All of them: schedulers and containers leave one or the other behind.
    size = os.environ.get("WORLD_SIZE", "")
    named = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return named and size.isdecimal() and int(size) > 1


def is_worker() -> bool:
    """Tell whether this process was started to work for another that leads."""
    return _MEMBERSHIP in os.environ or (is_under_torchrun() and os.environ["RANK"] != "0")


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
    rank: int, size: int, store: TCPStore | None, watched: Iterable[int], timeout: float
) -> Iterator[ProcessGroup]:
    # Over the loopback device unless told otherwise: a host's own name need not lead to it.
    if store is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if dist.is_initialized():
        # Left by a run that was interrupted in the midst of an exchange.
        dist.destroy_process_group()
    place: dict[str, Any] = (
        {} if store is None else {"store": store, "rank": rank, "world_size": size}
    )
    _call(
        lambda: dist.init_process_group("gloo", timeout=_TIMEOUT, **place),
        lambda joined: _wait_for_all(joined, max(timeout, _LEAST_TO_BEGIN)),
    )
    heartbeat = Heartbeat(_open_second_store(store), rank, watched, timeout)
    try:
        yield ProcessGroup(rank, size, heartbeat)
    except KeyboardInterrupt:
        # An exchange may be under way, and cannot be taken down while it is.
        raise
    except BaseException:
        _leave()
        raise
    finally:
        heartbeat.close()
    _leave()


def _wait_for_all(joined: Future[_Result], timeout: float) -> _Result:
    try:
        return joined.result(timeout)
    except TimeoutError:
        raise LostWorker(f"not all processes were there after {timeout:g} s") from None


def _open_second_store(store: TCPStore | None) -> TCPStore:
    """Return a line of its own to where the processes met, for signs of life between exchanges."""
    if store is not None:
        return TCPStore("127.0.0.1", store.port, None, False, _TIMEOUT, wait_for_workers=False)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, None, False, _TIMEOUT, wait_for_workers=False)


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


@contextmanager
def _open_store(size: int) -> Iterator[TCPStore]:
    """Open the place where the processes of this machine meet; nobody else can reach it."""
    # By default a store listens on every network that the machine has.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield TCPStore(
            "127.0.0.1",
            port,
            size,
            True,
            _TIMEOUT,
            wait_for_workers=False,
            # The store closes what it is given.
            master_listen_fd=os.dup(server.fileno()),
            use_libuv=True,
        )


def _await(workers: list[subprocess.Popen[bytes]], store: Store, timeout: float) -> None:
    """Wait until all have come; one that has ended never will."""
    began = time.monotonic()
    expected = [f"here/{rank}" for rank in range(1, len(workers) + 1)]
    while not store.check(expected):
        for worker in workers:
            if worker.poll() is not None:
                raise LostWorker(f"it ended with code {worker.returncode} before it began")
        if time.monotonic() - began > timeout:
            raise LostWorker(f"it had not begun after {timeout:g} s")
        time.sleep(0.02)


@contextmanager
def _started(size: int, port: int, worker: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the other processes of a group on this machine; end those that are left."""
    # The leader's modules, from the same places; "" is the folder it was started in.
    places = [str(Path(path).absolute()) for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment | {_MEMBERSHIP: f"{port}:{rank}:{size}"},
            # A terminal's Ctrl-C is for the leader, which decides what it means.
            process_group=0,
        )
        for rank in range(1, size)
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
        # Nobody is left to wait for. A call that outlived the interpreter would bring it down.
        for thread in _calls:
            thread.join(timeout=10)


def _call(call: Callable[[], _Result], wait: Callable[[Future[_Result]], _Result]) -> _Result:
    """Call torch.distributed; whatever goes wrong there means that somebody is gone."""
    outcome: Future[_Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    # In a thread: a call that waits for others keeps its own thread from hearing any signal.
    thread = threading.Thread(target=work, daemon=True)
    _calls[:] = [thread]
    thread.start()
    try:
        return wait(outcome)
    except (RuntimeError, ConnectionError) as error:
        # What the library says first is the reason; what comes before and after is its own affair.
        reason = re.sub(r"^\[[^]]*\]\s*", "", str(error)).split(". ")[0].splitlines()
        raise LostWorker(reason[0] if reason else repr(error)) from None


def _as_tensor(content: bytes) -> Tensor:
    # A bytearray, because torch wants memory that may be written to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)
