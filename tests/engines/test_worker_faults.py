"""Faults of worker processes: lost, stopped or with invalid input."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from command_processes import CommandProcess, call, command
from mpfedcl import Experiment, run
from mpfedcl.core.errors import InvalidInput, LostWorker
from small_experiments import assert_close_results, flags, read_records, save_images, small
from worker_processes import (
    children,
    free_port,
    is_gone,
    listening_addresses,
    start,
    start_two,
    wait_for_rounds,
)

pytestmark = pytest.mark.whole

Team = Callable[[], tuple[CommandProcess, int]]


@pytest.fixture(scope="module")
def team(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Return a factory of one endless run in two processes, reused while it lasts."""
    started: list[CommandProcess] = []
    found: list[tuple[CommandProcess, int]] = []

    def give() -> tuple[CommandProcess, int]:
        if not found or found[-1][0].poll() is not None:
            found.append(start_two(images, tmp_path_factory.mktemp("team"), started, forked=False))
        return found[-1]

    yield give
    for process in started:
        process.kill()


def test_lost_worker_ends_the_run_and_keeps_earlier_rounds(
    images: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    leader, worker = start_two(images, tmp_path, commands, dtype="float64")
    os.kill(worker, signal.SIGKILL)
    out, errors = leader.communicate()
    assert (leader.returncode, out) == (1, "")
    assert errors.count("\n") == 1
    assert "a worker was lost in round" in errors
    assert "Resume with: mpfedcl run --resume run" in errors
    done = len(read_records(tmp_path / "run"))
    assert done >= 3
    ended = call("run", "--resume", "run", "--rounds", done + 1, "--workers", 1, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    alone = {"rounds": done + 1, "workers": 1}
    experiment = Experiment.from_toml(tmp_path / "run" / "experiment.toml").replace(**alone)
    run(experiment, tmp_path / "whole")
    assert_close_results(tmp_path / "whole", tmp_path / "run", 1e-5)


def test_one_interrupt_ends_after_the_round_and_leaves_no_worker(
    images: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    leader, worker = start_two(images, tmp_path, commands)
    # To all processes, as a terminal does.
    os.kill(worker, signal.SIGINT)
    leader.send_signal(signal.SIGINT)
    _, errors = leader.communicate()
    assert leader.returncode == 130
    assert "Resume with: mpfedcl run --resume run" in errors
    assert is_gone(worker)


@pytest.mark.thorough
def test_second_interrupt_ends_a_waiting_leader(
    images: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    """Check that the leader does not wait for hours for a stopped worker."""
    leader, worker = start_two(images, tmp_path, commands)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1)
    leader.send_signal(signal.SIGINT)
    # Two signals that arrive together are one.
    time.sleep(1)
    leader.send_signal(signal.SIGINT)
    _, errors = leader.communicate()
    assert leader.returncode == 130
    assert errors.endswith("mpfedcl: stopped at once; what was done is kept.\n")
    assert is_gone(worker)


@pytest.mark.thorough
def test_stopped_worker_is_noticed_and_stopped_leader_continues(
    images: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    """Wait some seconds, at least twice the shortest timeout."""
    leader, worker = start_two(images, tmp_path, commands, worker_timeout=10)
    leader.send_signal(signal.SIGSTOP)
    time.sleep(15)
    leader.send_signal(signal.SIGCONT)
    wait_for_rounds(tmp_path / "run", len(read_records(tmp_path / "run")) + 2)
    os.kill(worker, signal.SIGSTOP)
    stopped = time.monotonic()
    out, errors = leader.communicate()
    assert 5 < time.monotonic() - stopped < 120
    assert (leader.returncode, out, errors.count("\n")) == (1, "", 1)
    assert "process 1 has not answered for 10 s" in errors
    assert "Resume with: mpfedcl run --resume run" in errors
    assert is_gone(worker)


@pytest.mark.thorough
def test_interrupt_from_the_terminal_does_not_reach_workers(team: Team) -> None:
    leader, worker = team()
    assert os.getpgid(worker) != os.getpgid(leader.pid)


def test_workers_listen_on_the_loopback_interface_only(team: Team) -> None:
    leader, worker = team()
    for process in (leader.pid, worker):
        assert listening_addresses(process) <= {"0100007F", "0" * 24 + "01000000"}


def test_workers_end_when_the_leader_is_killed(team: Team) -> None:
    leader, worker = team()
    leader.kill()
    assert is_gone(worker)


def test_no_worker_is_left_when_the_leader_is_killed_while_they_start(
    images: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    words = ["run", *flags(images, clients=4, rounds=100_000), "--workers", 2, "--out", "run"]
    leader = CommandProcess(words, tmp_path)
    commands.append(leader)
    for _ in range(600):
        if started := children(leader):
            break
        time.sleep(0.02)
    leader.kill()
    assert started
    assert all(is_gone(worker) for worker in started)


@pytest.mark.thorough
def test_processes_of_torchrun_end_when_it_is_killed(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-addr", "127.0.0.1", "--master-port", free_port(), "-m", "mpfedcl", "run"]
    words += map(str, flags(images, clients=4, rounds=100_000, evaluate_every=100_000))
    launcher = start([*words, "--out", "run"], tmp_path)
    processes.append(launcher)
    wait_for_rounds(tmp_path / "run", 2)
    started = psutil.Process(launcher.pid).children()
    assert len(started) == 2
    launcher.kill()
    assert all(is_gone(each.pid) for each in started)


def test_incomplete_torchrun_variables_are_ignored(images: Path, tmp_path: Path) -> None:
    words = ["run", *flags(images, clients=2), "--out", "run"]
    scraps = {"WORLD_SIZE": "4", "RANK": "1"}
    ended = call(*words, cwd=tmp_path, variables=scraps)
    assert ended.returncode == 0, ended.stderr


def test_torchrun_supports_only_the_command_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = call("compare", *flags(images), cwd=tmp_path, variables=place)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "compare was started by torchrun" in ended.stderr
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="is a worker of torchrun"):
        run(small(images), tmp_path / "run")


@pytest.mark.thorough
def test_workers_find_modules_where_the_leader_does(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """Use a method next to the script, imported by a path relative to it."""
    (tmp_path / "beside.py").write_text(
        "from mpfedcl.methods import Method\nclass Mine(Method):\n    pass\n"
    )
    words = ["run", *flags(images, method="beside:Mine", clients=4, workers=2), "--out", "run"]
    # Not forked, since Python reads the path when it starts.
    leader = start(command(*words), tmp_path, PYTHONPATH=".")
    processes.append(leader)
    _, errors = leader.communicate(timeout=300)
    assert leader.returncode == 0, errors


def test_bad_input_is_one_line_with_workers(tmp_path: Path) -> None:
    ended = call("run", "--dataset.name", "nothing", "--workers", 2, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    root = tmp_path / "none"
    words = ["run", "--dataset.name", "folder", "--dataset.root", root, "--workers", 2]
    ended = call(*words, cwd=tmp_path, forked_workers=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    ended = call("run", "--workers", 0, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "workers is 0" in ended.stderr


@pytest.mark.parametrize("fails_in", ["both", "worker"])
def test_error_of_own_code_is_one_line_with_workers(
    images: Path, tmp_path: Path, fails_in: str
) -> None:
    """Both processes make the model; only the leader prints, also what the worker alone found."""
    condition = "'MPFEDCL_WORKER' in os.environ" if fails_in == "worker" else "True"
    (tmp_path / "odd.py").write_text(
        "import os\nfrom torch import nn\n"
        "def model(num_classes):\n"
        f"    if {condition}:\n"
        "        raise KeyError('no weights')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(36, num_classes))\n"
    )
    words = ["run", *flags(images, clients=4, workers=2), "--model.name", "odd:model"]
    ended = call(*words, "--out", "run", cwd=tmp_path, forked_workers=True)
    errors = ended.stderr
    assert ended.returncode == (2 if fails_in == "both" else 1), errors
    assert errors.count("\n") == 1
    assert errors.count("model.name is 'odd:model', which fails (KeyError: 'no weights'") == 1
    assert ("a worker was lost" in errors) == (fails_in == "worker")


def test_worker_without_data_reports_the_folder(
    tmp_path: Path, commands: list[CommandProcess]
) -> None:
    """Start two processes of which one lacks the data folder."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in range(2):
        machine = tmp_path / f"machine-{rank}"
        machine.mkdir()
        if rank == 0:
            save_images(machine / "data" / "a.npz")
        words = ["run", *flags(Path("data"), clients=4), "--out", "run"]
        place = {"RANK": str(rank), "LOCAL_RANK": "0", **meeting}
        commands.append(CommandProcess(words, machine, place))
    (_, leader), (_, other) = (process.communicate() for process in commands)
    assert [process.returncode for process in commands] == [1, 2]
    assert leader.startswith("mpfedcl: a worker was lost before the first round")
    assert other.startswith("mpfedcl: dataset.name is 'folder', but its folder data")
    assert leader.count("\n") == other.count("\n") == 1


def test_started_workers_end_if_another_cannot_start(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_one(*words: Any, **settings: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(subprocess.Popen(*words, **settings))
        return started[0]

    kept = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    patched = SimpleNamespace(**kept, Popen=start_one)
    monkeypatch.setattr("mpfedcl.engines.worker_group.subprocess", patched)
    monkeypatch.setattr("mpfedcl.runs.worker_count.usable_cores", lambda: 3)
    with pytest.raises(OSError, match="temporarily unavailable"):
        run(small(images, workers=3), tmp_path / "run")
    assert started[0].poll() is not None


def test_worker_that_ends_at_start_is_reported(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpfedcl.engines.worker_group.sys.executable", "/bin/false")
    with pytest.raises(LostWorker, match="ended with code 1 before it began"):
        run(small(images, workers=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
