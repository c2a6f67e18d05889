"""Processes of one machine: what they write into shared memory is what all of them read."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.errors import LostWorker
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.heartbeat import Heartbeat
from mpfedcl.engines.local_group import LocalGroup
from mpfedcl.engines.shared_memory import Line, SharedMemory, SharedSigns

Result = TypeVar("Result")
TENSORS = st.lists(st.integers(0, 40), min_size=1, max_size=4)


class Processes:
    """Threads that stand for processes: each has lines and mappings of its own."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self._files = [SharedMemory.new() for _ in range(3)]
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.lines = [[own for own, _ in pairs], *([theirs] * (size - 1) for _, theirs in pairs)]
        self.size = size
        self._timeout = timeout

    def run(self, work: Callable[[LocalGroup], Result]) -> list[Result]:
        """Let all do the same; return what each has got."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda rank: self._work(rank, work), range(self.size)))

    def close(self) -> None:
        for file in self._files:
            file.close()
        for line in {line for lines in self.lines for line in lines}:
            line.close()

    def _work(self, rank: int, work: Callable[[LocalGroup], Result]) -> Result:
        *memory, board = (SharedMemory(os.dup(file.fileno())) for file in self._files)
        watched = range(1, self.size) if rank == 0 else ()
        heartbeat = Heartbeat(SharedSigns(board, self.size), rank, watched, self._timeout)
        try:
            lines = [
                Line(each, number if rank == 0 else 0, heartbeat)
                for number, each in enumerate(self.lines[rank], start=1)
            ]
            return work(LocalGroup(rank, heartbeat, lines, memory))
        finally:
            heartbeat.close()
            for file in (*memory, board):
                file.close()


def among(size: int, work: Callable[[LocalGroup], Result]) -> list[Result]:
    processes = Processes(size)
    try:
        return processes.run(work)
    finally:
        processes.close()


@given(st.integers(2, 4), st.lists(st.binary(max_size=200), min_size=4, max_size=4))
def test_all_get_what_all_have_written(size: int, contents: Sequence[bytes]) -> None:
    def work(group: LocalGroup) -> tuple[list[bytes], bytes, list[bytes]]:
        own = contents[group.rank]
        # Three in a row: each file is used again.
        return group.gather(own), group.broadcast(own), group.gather(own[::-1])

    expected = list(contents[:size])
    turned = [each[::-1] for each in expected]
    assert among(size, work) == [(expected, contents[0], turned)] * size


def test_more_than_the_files_hold_makes_them_grow() -> None:
    def work(group: LocalGroup) -> bool:
        large = bytes([group.rank]) * (3_000_000 + group.rank)
        small = group.gather(b"x")
        found = group.gather(large)
        return small == [b"x"] * 3 and all(
            each == bytes([rank]) * (3_000_000 + rank) for rank, each in enumerate(found)
        )

    assert among(3, work) == [True] * 3


@given(
    st.integers(2, 4),
    TENSORS,
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_sums_are_those_of_a_loop_in_order_of_rank(
    size: int, lengths: Sequence[int], dtype: torch.dtype
) -> None:
    def make(rank: int) -> Tensors:
        key = torch.Generator().manual_seed(rank)
        return {
            str(n): (100 * torch.randn(length, generator=key, dtype=torch.float64)).to(dtype)
            for n, length in enumerate(lengths)
        } | {"weight": torch.tensor(0.1 + rank, dtype=torch.float64)}

    expected = make(0)
    for rank in range(1, size):
        expected = {name: value + make(rank)[name] for name, value in expected.items()}
    for found in among(size, lambda group: group.sum(make(group.rank))):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


def test_a_sum_of_nothing_is_nothing() -> None:
    assert among(2, lambda group: group.sum({})) == [{}, {}]


def test_parts_come_to_the_leader_one_by_one() -> None:
    def work(group: LocalGroup) -> list[bytes]:
        parts = (b"%d" % group.rank * length for length in (1, 1_000_000))
        return list(group.gather_to_leader(parts))

    leaders, *others = among(3, work)
    assert leaders == [b"0", b"0" * 10**6, b"1", b"1" * 10**6, b"2", b"2" * 10**6]
    assert others == [[], []]


def test_who_closes_its_line_has_ended() -> None:
    processes = Processes(2)

    def work(group: LocalGroup) -> str:
        if not group.is_leader:
            processes.lines[1][0].close()
            return "gone"
        with pytest.raises(LostWorker, match="process 1 has ended"):
            group.gather(b"")
        return "noticed"

    assert processes.run(work) == ["noticed", "gone"]
    processes.close()


def test_who_says_nothing_is_taken_for_lost() -> None:
    processes, over = Processes(2, timeout=0.2), threading.Event()

    def work(group: LocalGroup) -> str:
        if not group.is_leader:
            over.wait()
            return "silent"
        try:
            with pytest.raises(LostWorker, match=r"no sign of life for 0\.2 s"):
                group.gather(b"")
        finally:
            over.set()
        return "noticed"

    assert processes.run(work) == ["noticed", "silent"]
    processes.close()
