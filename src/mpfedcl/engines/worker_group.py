"""The processes that run one experiment together, on one machine or on many: torch.distributed.

The leader, rank 0, records the run. It starts the workers of its own machine, which meet through a
file in a private folder and talk over the loopback interface; torchrun starts and connects those
of several machines. Bytes that travel are JSON or safetensors, never a pickle.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from mpfedcl.core.errors import LostWorker
from mpfedcl.core.processes import receive_at_end_of_parent
from mpfedcl.core.tensors import Tensors

MEMBERSHIP = "MPFEDCL_WORKER"
"""rank:size:store of a worker that the leader has started."""
LOST_ANOTHER = 3
"""The exit code of a worker that ends because another process is gone."""
_LEAST_TO_BEGIN = 120.0
"""Seconds that workers have at least to begin: they import torch first."""
_LONGEST = timedelta(days=7)
"""The timeout of torch.distributed, which must outlast any training. Its clock also runs while the
process is stopped by Ctrl-Z, so `WorkerGroup` counts the seconds of a wait itself."""
_SLICE = 1.0
"""Seconds of a wait after which the leader looks whether its workers are alive."""
_ENDING_SECONDS = 2.0
"""Seconds that a worker has to end after its connection was closed."""

_Result = TypeVar("_Result")


class WorkerGroup:
    """The place of this process among those that run the experiment."""

    def __init__(
        self,
        timeout: float,
        started: Sequence["subprocess.Popen[bytes]"] = (),
        store: Path | None = None,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = timeout
        """Seconds that this process waits for the others."""
        self._started, self._store = started, store
        self._exchange: Future[object] | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process records the run."""
        return self.rank == 0

    def expect_within(self, seconds: float) -> None:
        """Limit how long this process waits for the others, unless it has no limit."""
        if not math.isinf(self.timeout):
            self.timeout = seconds

    def sum(self, tensors: Tensors) -> Tensors:
        """Return the sums over all processes, with the same bits in each."""
        total: Tensors = {}
        for dtype in dict.fromkeys(value.dtype for value in tensors.values()):
            alike = {name: value for name, value in tensors.items() if value.dtype == dtype}
            flat = torch.cat([value.flatten().cpu() for value in alike.values()])
            self._call(partial(dist.all_reduce, flat))
            parts = torch.split(flat, [value.numel() for value in alike.values()])
            for (name, value), part in zip(alike.items(), parts, strict=True):
                total[name] = part.view_as(value).to(value.device)
        return {name: total[name] for name in tensors}

    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the leader's bytes in every process."""
        return self._call(partial(self._share, content, 0))

    def gather(self, content: bytes) -> list[bytes]:
        """Return the bytes of every process in every process, by rank."""
        return self._call(lambda: [self._share(content, rank) for rank in range(self.size)])

    def gather_to_leader(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of all processes to the leader, one at a time; others yield nothing."""
        if self.is_leader:
            yield from parts
            for rank in range(1, self.size):
                receive = partial(_move, None, partial(dist.recv, src=rank))
                while part := self._call(receive):
                    yield part
        else:
            for part in chain(parts, (b"",)):
                self._call(partial(_move, part, partial(dist.send, dst=0)))

    def _share(self, content: bytes, source: int) -> bytes:
        """Return the content of one process in every process."""
        return _move(content if self.rank == source else None, partial(dist.broadcast, src=source))

    def wait(self) -> None:
        """Return when all processes have called this, however long that takes."""
        self._call(dist.barrier, math.inf)

    def _call(self, exchange: Callable[[], _Result], timeout: float | None = None) -> _Result:
        """Return what an exchange brings; raise LostWorker if it fails."""
        timeout = self.timeout if timeout is None else timeout
        outcome = _in_thread(exchange)
        self._exchange = outcome  # type: ignore[assignment]
        # By slices: of the time in which this process was stopped at most one of them counts.
        waited = 0.0
        try:
            while waited < timeout:
                try:
                    return outcome.result(timeout=min(_SLICE, timeout))
                except FutureTimeout:
                    if outcome.done():
                        return outcome.result()
                waited += _SLICE
        except (RuntimeError, ConnectionError) as error:
            # The library's first sentence is the reason; the rest is its own affair.
            reason = re.sub(r"^\[[^]]*\]\s*", "", str(error)).split(". ")[0].splitlines()
            raise LostWorker(self._name_ended() or (reason or [repr(error)])[0]) from None
        silent = "process 1" if self.is_leader and self.size == 2 else "another process"
        raise LostWorker(f"{silent} has not answered for {timeout:g} s")

    def _name_ended(self) -> str | None:
        """Return which worker has ended and why, unless it ended because of another one."""
        if not self._started or self._store is None:
            return None
        deadline = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < deadline:
            for rank, worker in enumerate(self._started, start=1):
                if worker.poll() not in (None, LOST_ANOTHER):
                    file = _fault_file(self._store, rank)
                    fault = f": {file.read_text('utf-8').rstrip('.')}" if file.exists() else ""
                    return f"process {rank} has ended{fault}"
            time.sleep(0.02)
        return None

    def leave(self) -> None:
        """Take the connections down, unless an exchange is still under way."""
        if self._exchange is not None and not self._exchange.done():
            with contextlib.suppress(BaseException):
                self._exchange.result(timeout=_ENDING_SECONDS)
        if self._exchange is None or self._exchange.done():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


@contextmanager
def open_worker_group(
    num_workers: int, worker: str, timeout: float = _LEAST_TO_BEGIN
) -> Iterator[WorkerGroup | None]:
    """Join the group that this process was started in, or start one; None for a single process.

    Args:
        num_workers: The processes of a new group, this one included.
        worker: The module that the other processes run.
        timeout: Seconds that a process waits for the others in an exchange.
    """
    with contextlib.ExitStack() as stack:
        group = None
        if MEMBERSHIP in os.environ:
            rank, size, store = os.environ[MEMBERSHIP].split(":", 2)
            # A worker ends with its leader, and waits for one that is stopped by Ctrl-Z.
            member = _member(math.inf, int(rank), int(size), Path(store))
            group = stack.enter_context(member)
        elif is_under_torchrun():
            if "TORCHELASTIC_RUN_ID" in os.environ:
                # Other launchers may end before the processes that they have started.
                receive_at_end_of_parent(signal.SIGTERM)
            group = stack.enter_context(_member(timeout))
        elif num_workers > 1:
            folder = tempfile.TemporaryDirectory(prefix="mpfedcl-")
            store_file = Path(stack.enter_context(folder)) / "store"
            workers = stack.enter_context(_started(num_workers, worker, store_file))
            member = _member(timeout, 0, num_workers, store_file, workers)
            group = stack.enter_context(member)
        yield group


def is_under_torchrun() -> bool:
    """Return whether torchrun has started this process together with others."""
    # All variables: schedulers and containers set one or the other.
    size = os.environ.get("WORLD_SIZE", "")
    named = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return named and size.isdecimal() and int(size) > 1


def is_worker() -> bool:
    """Return whether this process was started to work for a leader."""
    return MEMBERSHIP in os.environ or (is_under_torchrun() and os.environ["RANK"] != "0")


def leave_fault(fault: str) -> None:
    """Tell the leader why this worker ends: only the leader prints, and its own error first."""
    rank, _, store = os.environ[MEMBERSHIP].split(":", 2)
    with contextlib.suppress(OSError):
        _fault_file(Path(store), int(rank)).write_text(fault, "utf-8", "backslashreplace")


def _fault_file(store: Path, rank: int) -> Path:
    return store.with_name(f"fault-{rank}")


def assign_clients(work: Mapping[str, int], num_processes: int) -> list[list[str]]:
    """Return each process's clients, in name order, so that all have about the same work.

    Example:
        >>> assign_clients({"a": 3, "b": 3, "c": 3, "d": 1}, 2)
        [['b', 'd'], ['a', 'c']]
    """
    shares: list[list[str]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    # The largest client first, to the process with the least work; names break ties.
    for name in sorted(work, key=lambda each: (-work[each], each)):
        # The last such process: the leader, rank 0, also writes checkpoints.
        idlest = max(range(num_processes), key=lambda each: (-loads[each], each))
        shares[idlest].append(name)
        loads[idlest] += work[name]
    return [sorted(names) for names in shares]


@contextmanager
def _member(
    timeout: float,
    rank: int = -1,
    size: int = -1,
    store: Path | None = None,
    workers: Sequence["subprocess.Popen[bytes]"] = (),
) -> Iterator[WorkerGroup]:
    """Connect this process to the others, through a file or with the variables of torchrun."""
    if dist.is_initialized():
        # Left by a run that was interrupted during an exchange.
        dist.destroy_process_group()
    patience = _LEAST_TO_BEGIN if math.isinf(timeout) else max(timeout, _LEAST_TO_BEGIN)
    meeting = None
    if store is not None:
        meeting = FileStore(str(store), size)
        if rank:
            meeting.set(f"begun/{rank}", "1")
        else:
            _wait_for_workers(meeting, workers, patience)

    def connect() -> None:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=_LONGEST)

    try:
        with contextlib.nullcontext() if store is None else _loopback_only():
            _in_thread(connect).result(timeout=patience)
    except FutureTimeout:
        raise LostWorker(f"not all processes were there after {patience:g} s") from None
    except (RuntimeError, ConnectionError) as error:
        raise LostWorker(f"the processes cannot connect: {str(error).splitlines()[0]}") from None
    group = WorkerGroup(timeout, workers, store)
    try:
        yield group
    except BaseException:
        # An exchange with workers that are gone ends at once.
        _end(workers)
        raise
    finally:
        group.leave()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let gloo listen where only this machine can connect."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _started(size: int, worker: str, store: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Start the workers of a group; kill those that have not ended at the end."""
    # The leader's import path; "" is the folder in which it was started.
    places = [str(Path(path).absolute()) for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, size):
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", worker],
                    # A worker ends when the leader's end of this pipe is closed.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=environment | {MEMBERSHIP: f"{rank}:{size}:{store}"},
                    # A terminal's Ctrl-C is for the leader, which decides what it means.
                    process_group=0,
                )
            )
        yield workers
    finally:
        _end(workers)


def _end(workers: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Give workers a moment to end, then kill them."""
    for process in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        if process.poll() is None:
            process.kill()
    for process in workers:
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _wait_for_workers(
    store: Store, workers: Sequence["subprocess.Popen[bytes]"], timeout: float
) -> None:
    """Wait until all workers have begun; one that has ended never will."""
    end = time.monotonic() + timeout
    waiting = dict(enumerate(workers, start=1))
    while waiting := {rank: each for rank, each in waiting.items() if not _has_begun(store, rank)}:
        for rank, worker in waiting.items():
            if worker.poll() is not None:
                raise LostWorker(
                    f"process {rank} ended with code {worker.returncode} before it began"
                )
        if time.monotonic() > end:
            raise LostWorker(f"process {min(waiting)} had not begun after {timeout:g} s")
        time.sleep(0.01)


def _has_begun(store: Store, rank: int) -> bool:
    return bool(store.check([f"begun/{rank}"]))


def _in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Run a call in a thread of its own: the main thread stays free for signals, which a blocking
    exchange would hold up."""
    outcome: Future[_Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome


def _move(content: bytes | None, move: Callable[[Tensor], object]) -> bytes:
    """Send bytes by a call that moves a tensor, or receive them if there are none."""
    size = torch.tensor([0 if content is None else len(content)])
    move(size)
    if not int(size):
        return b""
    if content is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
        move(buffer)
        return buffer.numpy().tobytes()
    # A bytearray, because torch wants memory that may be written to.
    move(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return content
