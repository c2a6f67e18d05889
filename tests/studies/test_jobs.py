"""Runs at the same time: interrupts and failures end all of them, after a round or at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_processes import CommandProcess, forked_from_server
from mpfedcl import InvalidInput, resume
from mpfedcl.api import run_or_resume
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions, PlannedRun, run_planned
from small_experiments import flags, small

pytestmark = pytest.mark.whole

ROUNDS = 4000
"""More than any test waits for."""
Process = CommandProcess


@pytest.fixture
def start(tmp_path: Path, images: Path) -> Iterator[Callable[..., Process]]:
    """Start a comparison of two runs at the same time; what is left of it in the end is killed."""
    started: list[Process] = []

    def begin(*, forked_jobs: bool = False, **changes: object) -> Process:
        chosen = ["--methods", "local", "fedavg", "--seeds", 0, "--jobs", 2]
        words = ["compare", *chosen, *flags(images, **changes), "--out", tmp_path / "out"]
        started.append(CommandProcess(words, tmp_path, new_session=True, forked_jobs=forked_jobs))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def count_files(path: Path, name: str) -> int:
    return len([each for each in path.glob(f"*/{name}") if each.stat().st_size])


def workers_of(parent: int) -> list[int]:
    """Return the processes that a process has started to make runs."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            if b"spawn_main" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except (OSError, IndexError):
            continue
    return found


def ended(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate()
    assert "Traceback" not in err
    return process.wait(), out, err


def is_gone(pid: int) -> bool:
    # Nobody's child any more: init may take a moment to bury it.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_an_interrupt_of_the_parent_alone_ends_all_after_their_round(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    before = forked_from_server()
    process = start(rounds=ROUNDS, forked_jobs=True)
    wait_until(lambda: count_files(tmp_path / "out", "rounds.jsonl") == 2, process)
    workers = [each for each in forked_from_server() if each not in (*before, process.pid)]
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "")
    assert "continues where it stopped" in " ".join(err.split())
    assert all(is_gone(worker) for worker in workers)
    for path in (tmp_path / "out").iterdir():
        done = (path / "rounds.jsonl").read_text()
        assert done.endswith("\n")
        assert done.count("\n") < ROUNDS


@pytest.mark.thorough
def test_a_second_interrupt_of_the_parent_alone_ends_all_at_once(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    # A round of many seconds.
    before = forked_from_server()
    process = start(rounds=2, train__epochs=20_000, forked_jobs=True)
    wait_until(lambda: count_files(tmp_path / "out", "partition.json") == 2, process)
    workers = [each for each in forked_from_server() if each not in (*before, process.pid)]
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    # Two signals that arrive together are one.
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "")
    assert "mpfedcl: stopped at once" in err
    assert all(is_gone(worker) for worker in workers)
    assert count_files(tmp_path / "out", "rounds.jsonl") == 0
    # Their locks went with them, and the runs can be resumed.
    path = tmp_path / "out" / "local-seed0"
    settings = path / "experiment.toml"
    settings.write_text(settings.read_text().replace("epochs = 20000", "epochs = 1"))
    assert resume(path).accuracy is not None


@pytest.mark.thorough
def test_an_interrupt_while_processes_are_still_starting(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    process = start(rounds=ROUNDS)
    wait_until(lambda: len(workers_of(process.pid)) == 2, process)
    # As a terminal does: to every process of the group. They import torch for a second or more.
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "")
    assert err.count("\n") == 2, err
    assert count_files(tmp_path / "out", "rounds.jsonl") == 0


@pytest.mark.usefixtures("forked_jobs")
def test_failed_run_stops_the_others_after_their_round(images: Path, tmp_path: Path) -> None:
    whole = small(images, "local")
    experiments = {
        "long": whole.replace(rounds=ROUNDS),
        "short": whole.replace(rounds=2),
        "wrong": whole.replace(clients=61, rounds=1),
    }
    planned_runs = [
        PlannedRun(each.resolved(), tmp_path / name) for name, each in experiments.items()
    ]
    with pytest.raises(InvalidInput, match="clients is 61"):
        run_planned(planned_runs, JobOptions(run_or_resume, jobs=2))
    long, short, _ = planned_runs
    assert short.is_done()
    assert RunDirectory(long.path).read_summary() is None
    assert 0 < long.rounds_done() < ROUNDS
    # Nobody holds it any more.
    done = long.rounds_done()
    assert len(resume(long.path, rounds=done + 1).history) == done + 1
