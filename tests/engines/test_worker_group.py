"""Processes that exchange bytes and sums, and what happens when one of them is lost."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_processes import FORKS, start_server
from mpfedcl.core.errors import LostWorker
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines import worker_group
from mpfedcl.engines.worker_group import LOST_ANOTHER, WorkerGroup, _member

pytestmark = pytest.mark.whole

Work = Callable[[WorkerGroup], Any]


def among(size: int, work: Work, folder: Path, timeout: float = 60.0) -> list[Any]:
    """Run the same work in several processes and return each result."""
    start_server()
    pipes = [FORKS.Pipe(duplex=False) for _ in range(size)]
    started = [
        FORKS.Process(target=_work, args=(rank, size, folder / "store", work, pipe[1], timeout))
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, writing) in zip(started, pipes, strict=True):
        process.start()
        writing.close()
    try:
        return [_receive(reading) for reading, _ in pipes]
    finally:
        for process in started:
            process.kill()
            process.join()


def _receive(reading: Connection) -> Any:
    try:
        return reading.recv() if reading.poll(60) else "silent"
    except EOFError:
        return "gone"


def _work(
    rank: int, size: int, store: Path, work: Work, answer: Connection, timeout: float
) -> None:
    # The leader waits for the processes that it starts; here all have started already.
    vars(worker_group)["_wait_for_workers"] = lambda *_: None
    with _member(timeout, rank, size, store) as group:
        try:
            result = work(group)
        except LostWorker as error:
            result = f"lost: {error}"
        answer.send(result)
        group.gather(b"")


def exchange(group: WorkerGroup) -> list[list[bytes]]:
    own = bytes([group.rank]) * (3_000_000 * group.rank)
    small = b"%d" % group.rank
    return [group.gather(small), [group.broadcast(small)], group.gather(own), group.gather(b"")]


def test_every_process_receives_the_bytes_of_all(tmp_path: Path) -> None:
    large = [bytes([rank]) * (3_000_000 * rank) for rank in range(3)]
    expected = [[b"0", b"1", b"2"], [b"0"], large, [b""] * 3]
    assert among(3, exchange, tmp_path) == [expected] * 3


def make_tensors(rank: int) -> Tensors:
    key = torch.Generator().manual_seed(rank)
    wide = torch.randn(7, 5, generator=key, dtype=torch.float64)
    counts = torch.arange(4) + rank
    return {"wide": wide, "narrow": wide.float(), "counts": counts, "weight": wide.sum()}


def add(group: WorkerGroup) -> list[dict[str, Any]]:
    found = group.sum(make_tensors(group.rank))
    assert group.sum({}) == {}
    return [{name: (str(value.dtype), value.tolist()) for name, value in found.items()}]


def test_sums_over_processes_have_the_same_bits_in_each(tmp_path: Path) -> None:
    first, *others = among(3, add, tmp_path)
    assert others == [first] * 2
    expected = make_tensors(0)
    for rank in (1, 2):
        expected = {name: value + make_tensors(rank)[name] for name, value in expected.items()}
    assert list(first[0]) == list(expected)
    for name, value in expected.items():
        dtype, found = first[0][name]
        assert dtype == str(value.dtype)
        torch.testing.assert_close(torch.tensor(found, dtype=value.dtype), value)


def send_parts(group: WorkerGroup) -> list[bytes]:
    parts = (b"%d" % group.rank * length for length in (1, 1_000_000))
    return list(group.gather_to_leader(parts))


def test_parts_reach_the_leader_one_by_one(tmp_path: Path) -> None:
    leader, *others = among(3, send_parts, tmp_path)
    assert leader == [b"0", b"0" * 10**6, b"1", b"1" * 10**6, b"2", b"2" * 10**6]
    assert others == [[], []]


def end_suddenly(group: WorkerGroup) -> str:
    if not group.is_leader:
        os.kill(os.getpid(), signal.SIGKILL)
    group.gather(b"")
    return "unnoticed"


def test_process_that_has_ended_is_noticed(tmp_path: Path) -> None:
    leader, other = among(2, end_suddenly, tmp_path)
    assert leader.startswith("lost: ")
    assert "\n" not in leader
    assert other == "gone"


def stop(group: WorkerGroup) -> str:
    if not group.is_leader:
        time.sleep(60)
    group.gather(b"")
    return "unnoticed"


def test_process_that_does_not_answer_is_noticed_after_the_timeout(tmp_path: Path) -> None:
    start_server()
    pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
    started = [
        FORKS.Process(target=_work, args=(rank, 2, tmp_path / "store", stop, pipe[1], 1.0))
        for rank, pipe in enumerate(pipes)
    ]
    for process in started:
        process.start()
    try:
        assert _receive(pipes[0][0]) == "lost: process 1 has not answered for 1 s"
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ([LOST_ANOTHER, -9], 2),
        ([-9, LOST_ANOTHER], 1),
        ([None, 1], 2),
        ([LOST_ANOTHER, None], None),
    ],
)
def test_worker_that_ended_because_of_another_is_not_named(
    codes: list[int | None], named: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_group, "_ENDING_SECONDS", 0.05)
    started = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    group: Any = SimpleNamespace(_started=started, _store=tmp_path / "store")
    reported = WorkerGroup._name_ended(group)
    assert reported == (None if named is None else f"process {named} has ended")
