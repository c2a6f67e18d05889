"""A client that two processes train: the same bits as if one had trained it."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_experiments import assert_close_results, read_records
from tasks import Task

from mpfedcl import Experiment, run
from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.direct import Begun, DirectTrainer
from mpfedcl.engines.handover import Handover
from mpfedcl.engines.heartbeat import Heartbeat
from mpfedcl.engines.shared_memory import Line, SharedMemory, SharedSigns
from mpfedcl.engines.trainer_choice import TrainerChoice


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Handover, Handover]]:
    """Who begins, and who finishes."""
    board, memory = SharedMemory.new(), SharedMemory.new()
    beating = Heartbeat(SharedSigns(board, 2), 0, (), 30.0)
    pair = socket.socketpair()
    files = [memory, SharedMemory(os.dup(memory.fileno()))]
    yield tuple(  # type: ignore[misc]
        Handover(file, Line(each, rank, beating))
        for rank, (file, each) in enumerate(zip(files, pair, strict=True))
    )
    beating.close()
    for connection in pair:
        connection.close()
    for file in (board, *files):
        file.close()


@given(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.99]), st.integers(1, 70))
def test_begun_here_and_finished_there_is_trained_at_once(
    ends: tuple[Handover, Handover], part: float, momentum: float, num_samples: int
) -> None:
    task = Task([num_samples], train__momentum=momentum)
    trainer = task.direct()
    (wanted,) = trainer.train(task.works, 1, task.received)
    (one,) = task.works

    def begin(memory: tuple[Tensors, Tensors]) -> Begun:
        return trainer.begin(one, 1, task.received, part, memory)

    ends[0].give(1, one.start, begin)
    begun, memory = ends[1].take(1, one.start)
    assert begun.num_steps == round(part * -(-num_samples // 4))
    found = trainer.finish(one, 1, task.received, begun, memory)
    for name, value in wanted.params(0).items():
        assert torch.equal(found.params(0)[name], value)
    assert found.losses[0] == pytest.approx(wanted.losses[0], rel=1e-14)


def test_a_model_larger_than_the_file(ends: tuple[Handover, Handover]) -> None:
    like = {"w": torch.rand(700, 600), "b": torch.rand(3)}

    def begin(memory: tuple[Tensors, Tensors]) -> Begun:
        for number, tensors in enumerate(memory):
            for name, value in tensors.items():
                value.copy_(like[name] + number)
        return Begun(3, 0.5, 7.0)

    with ThreadPoolExecutor(1) as other:
        taken = other.submit(ends[1].take, 7, like)
        ends[0].give(7, like, begin)
        begun, memory = taken.result()
    assert begun == Begun(3, 0.5, 7.0)
    for number, tensors in enumerate(memory):
        for name, value in tensors.items():
            assert torch.equal(value, like[name] + number)


@pytest.mark.whole
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("method", ["fedavg", "mp-fedcl"])
def test_two_workers_with_three_clients_train_one_together(method: str, tmp_path: Path) -> None:
    base = Experiment(method=method, rounds=2, clients=3, dtype="float64", evaluate_every=2)
    experiment = base.replace(dataset__train_size=480, partition__kind="iid")
    run(experiment.replace(workers=1, engine="loop"), tmp_path / "alone")
    run(experiment.replace(workers=2), tmp_path / "together")
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)
    for record in read_records(tmp_path / "together"):
        assert record["remarks"]["training"]["direct"] == 3


def test_what_cannot_be_continued_is_trained_by_who_answers_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Task([40])
    choice = TrainerChoice(task.assembly)
    (one,) = task.works
    nowhere: tuple[Tensors, Tensors] = ({}, {})
    monkeypatch.setattr(DirectTrainer, "begin", _fail)
    assert choice.begin(one, 1, task.received, 0.5, nowhere) == Begun(0)
    (done,) = choice.finish(one, 1, task.received, Begun(0), nowhere)
    (wanted,) = choice.train([one], 1, task.received)
    # So it is where something goes wrong on the way.
    monkeypatch.setattr(DirectTrainer, "finish", _fail)
    (after_all,) = choice.finish(one, 1, task.received, Begun(3), nowhere)
    for name, value in wanted.params(0).items():
        assert torch.equal(done.params(0)[name], value)
        assert torch.equal(after_all.params(0)[name], value)


def _fail(*_: object) -> None:
    raise TypeError("not linear after all")
