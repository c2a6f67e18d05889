"""The processes that run one experiment together, on one machine or on many.

Bytes from the leader to all, bytes from all to all, tensors summed. What travels as bytes is JSON
or safetensors, never a pickle. `local_group.py` has the processes of one machine, `gloo_group.py`
those that torchrun has started, on any number of machines.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.handover import Handover
from mpfedcl.engines.heartbeat import Heartbeat

MEMBERSHIP = "MPFEDCL_PROCESS_GROUP"
"""connection:rank:size, for processes that this package starts itself."""
WORKER_TIMEOUT = 300.0
"""Seconds without a sign of life, for processes that have not been told otherwise yet."""
LEAST_TO_BEGIN = 120.0
"""Seconds that processes are given at least to begin, before there are signs of life."""


class ProcessGroup(ABC):
    """This process's place among those that work together; number 0 leads and records."""

    def __init__(self, rank: int, size: int, heartbeat: Heartbeat) -> None:
        self.rank = rank
        self.size = size
        self.heartbeat = heartbeat
        self.begins: Handover | None = None
        """What is shared with the process before, of whose clients this one may begin one."""
        self.finishes: Handover | None = None
        """What is shared with the process after, which may have begun one of this one's."""

    @property
    def shares_memory(self) -> bool:
        """Whether neighboring processes can train a client together."""
        return self.begins is not None or self.finishes is not None

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def expect_signs_within(self, seconds: float) -> None:
        """Take a process for lost that has given no sign of life for so long."""
        self.heartbeat.timeout = seconds

    def wait(self) -> None:
        """Go on when all processes have come here."""
        self.gather(b"")

    def gather_to_leader(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of all processes to the leader, one at a time; others yield nothing."""
        if self.is_leader:
            yield from parts
            for rank in range(1, self.size):
                while part := self._receive(rank):
                    yield part
        else:
            for part in parts:
                self._send(part)
            self._send(b"")

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

    @abstractmethod
    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the leader's bytes in every process."""

    @abstractmethod
    def gather(self, content: bytes) -> list[bytes]:
        """Return every process's bytes in every process, in order of rank."""

    @abstractmethod
    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum over all processes of these numbers, one after the other."""

    @abstractmethod
    def _send(self, content: bytes) -> None:
        """Send bytes to the leader."""

    @abstractmethod
    def _receive(self, rank: int) -> bytes:
        """Return what a process has sent to this one, the leader."""


@contextmanager
def open_process_group(
    num_workers: int, worker: str, timeout: float = WORKER_TIMEOUT
) -> Iterator[ProcessGroup | None]:
    """Join the group that this process was started in, or start one; None for a process alone.

    `worker` is the module that the other processes run; `timeout` the seconds after which one that
    gives no sign of life is taken for lost.
    """
    # Only what is used: gloo takes its time to load.
    if MEMBERSHIP in os.environ:
        from mpfedcl.engines.local_group import join_local_group

        with join_local_group(os.environ[MEMBERSHIP], timeout) as group:
            yield group
    elif is_under_torchrun():
        from mpfedcl.engines.gloo_group import join_gloo_group

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with join_gloo_group(rank, size, timeout) as group:
            yield group
    elif num_workers > 1:
        from mpfedcl.engines.local_group import start_local_group

        with start_local_group(num_workers, worker, timeout) as group:
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
    return MEMBERSHIP in os.environ or (is_under_torchrun() and os.environ["RANK"] != "0")
