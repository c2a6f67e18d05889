"""The processes that torchrun has started, on one machine or many: gloo over TCP."""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from mpfedcl.core.errors import LostWorker
from mpfedcl.engines.heartbeat import Heartbeat
from mpfedcl.engines.process_group import LEAST_TO_BEGIN, ProcessGroup

_TIMEOUT = timedelta(hours=6)
"""How long an exchange may take, which must outlast any evaluation. Who has ended is noticed at
once, and who hangs by its heartbeat; this is for what is left."""
_Result = TypeVar("_Result")


class GlooGroup(ProcessGroup):
    """A thin layer over torch.distributed."""

    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the leader's bytes in every process."""
        return self._call(lambda: self._broadcast(content, 0))

    def gather(self, content: bytes) -> list[bytes]:
        """Return every process's bytes in every process, in order of rank."""
        return self._call(lambda: [self._broadcast(content, rank) for rank in range(self.size)])

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        flat = torch.cat(list(values))
        self._call(lambda: dist.all_reduce(flat))
        return flat

    def _send(self, content: bytes) -> None:
        def send() -> None:
            dist.send(torch.tensor([len(content)]), 0)
            if content:
                dist.send(_as_tensor(content), 0)

        self._call(send)

    def _receive(self, rank: int) -> bytes:
        def receive() -> bytes:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank)
            buffer = _empty(int(size))
            if int(size):
                dist.recv(buffer, rank)
            return buffer.numpy().tobytes()

        return self._call(receive)

    def _call(self, call: Callable[[], _Result]) -> _Result:
        return _call(call, self.heartbeat.wait)

    def _broadcast(self, content: bytes, source: int) -> bytes:
        size = torch.tensor([len(content)])
        dist.broadcast(size, source)
        if not int(size):
            return b""
        buffer = _as_tensor(content) if self.rank == source else _empty(int(size))
        dist.broadcast(buffer, source)
        return content if self.rank == source else buffer.numpy().tobytes()


@contextmanager
def join_gloo_group(rank: int, size: int, timeout: float) -> Iterator[GlooGroup]:
    """Meet the other processes where the environment says."""
    if dist.is_initialized():
        # Left by a run that was interrupted in the midst of an exchange.
        dist.destroy_process_group()
    _call(
        lambda: dist.init_process_group("gloo", timeout=_TIMEOUT),
        lambda joined: _wait_for_all(joined, max(timeout, LEAST_TO_BEGIN)),
    )
    watched = range(1, size) if rank == 0 else (0,)
    heartbeat = Heartbeat(StoreSigns(_open_second_store()), rank, watched, timeout)
    try:
        yield GlooGroup(rank, size, heartbeat)
    except KeyboardInterrupt:
        # An exchange may be under way, and cannot be taken down while it is.
        raise
    except BaseException:
        _leave()
        raise
    finally:
        heartbeat.close()
    _leave()


class StoreSigns:
    """Signs of life in a store that all processes can reach."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, rank: int, sign: int) -> None:
        """Write down a process's newest sign."""
        self._store.set(f"sign/{rank}", str(sign))

    def read(self, rank: int) -> int:
        """Return a process's newest sign; 0: there is none yet."""
        key = f"sign/{rank}"
        # To get what is not there yet would wait for it.
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _open_second_store() -> TCPStore:
    """Return a line of its own to where the processes met, for signs of life between exchanges."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, None, False, _TIMEOUT, wait_for_workers=False)


def _wait_for_all(joined: Future[_Result], timeout: float) -> _Result:
    try:
        return joined.result(timeout)
    except TimeoutError:
        raise LostWorker(f"not all processes were there after {timeout:g} s") from None


def _leave() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _call(call: Callable[[], _Result], wait: Callable[[Future[_Result]], _Result]) -> _Result:
    """Call torch.distributed; whatever goes wrong there means that somebody is gone."""
    outcome: Future[_Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    # In a thread: a call that waits for others keeps its own thread from hearing any signal.
    threading.Thread(target=work, daemon=True).start()
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
