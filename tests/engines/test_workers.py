"""Several processes for one experiment: the same result, and a clear end when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl import resume, run
from mpfedcl.engines import deal_clients
from mpfedcl.errors import InvalidInput, LostWorker
from small_runs import (
    METHODS,
    assert_close_results,
    call,
    command,
    environment,
    flags,
    read_records,
    read_summary,
    save_images,
    small,
)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Collects processes; ends those that a failed test leaves behind."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def start(words: list[str], cwd: Path, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def wait_for_rounds(path: Path, count: int) -> None:
    file = path / "rounds.jsonl"
    for _ in range(600):
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{file} never had {count} rounds")


def children(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in listed]


def listening_addresses(process: int) -> set[str]:
    """Return the addresses, as the kernel writes them, on which a process waits for calls."""
    held = {
        str(each.readlink()) for each in Path(f"/proc/{process}/fd").iterdir() if each.is_symlink()
    }
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
    ]
    # Column 3 is the state, 0A for listening; column 9 the number of the socket.
    return {
        words[1].partition(":")[0]
        for words in lines
        if words[3] == "0A" and f"socket:[{words[9]}]" in held
    }


def is_gone(process: int) -> bool:
    """Wait a while for a process to end; a zombie has ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def start_two(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> tuple[subprocess.Popen[str], int]:
    """Start a run without end in two processes, and wait for its first round."""
    words = flags(images, clients=4, rounds=100_000, evaluate_every=100_000)
    leader = start(command("run", *words, "--workers", 2, "--out", "run"), tmp_path)
    processes.append(leader)
    wait_for_rounds(tmp_path / "run", 1)
    (worker,) = children(leader)
    return leader, worker


# The same result


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_are_one(images: Path, tmp_path: Path, method: str) -> None:
    experiment = small(images, method, dtype="float64", rounds=3, clients=5, fraction=0.8)
    alone = run(experiment.replace(engine="loop"), tmp_path / "alone")
    together = run(experiment.replace(workers=2), tmp_path / "together")
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)
    assert alone.summary is not None
    assert together.summary is not None
    assert together.summary["readings"] == alone.summary["readings"]
    counted = [tmp_path / name / "confusion.json" for name in ("alone", "together")]
    assert counted[0].read_bytes() == counted[1].read_bytes()
    assert together.summary["accuracy_per_client"] == alone.summary["accuracy_per_client"]
    for name in ("bytes", "clients", "sent"):
        assert [r[name] for r in together.history] == [r[name] for r in alone.history]


def test_in_single_precision_after_one_round(images: Path, tmp_path: Path) -> None:
    experiment = small(images, rounds=1, clients=5)
    run(experiment.replace(engine="loop"), tmp_path / "alone")
    run(experiment.replace(workers=2), tmp_path / "together")
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)


def test_more_workers_than_clients(images: Path, tmp_path: Path) -> None:
    experiment = small(images, dtype="float64", clients=2)
    run(experiment, tmp_path / "alone")
    run(experiment.replace(workers=3), tmp_path / "together")
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)


@pytest.mark.parametrize("method", ["fedproto", "custom_method:Scaffold"])
def test_resume_with_another_number_of_workers(
    images: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients keep between rounds finds its way to whichever process has them now."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    experiment = small(images, method, dtype="float64", rounds=4, clients=4)
    run(experiment.replace(engine="loop"), tmp_path / "whole")
    run(experiment.replace(rounds=2), tmp_path / "parts")
    resume(tmp_path / "parts", rounds=3, workers=2)
    resume(tmp_path / "parts", rounds=4, workers=1, engine="loop")
    assert_close_results(tmp_path / "whole", tmp_path / "parts", 1e-5)


def test_torchrun_with_two_processes(images: Path, tmp_path: Path) -> None:
    words = ["run", *flags(images, dtype="float64", clients=4), "--out"]
    ended = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "mpfedcl", *words, "together"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # One of them speaks.
    assert ended.stdout.count("mean over clients") == 1
    assert call(*words, "alone", cwd=tmp_path).returncode == 0
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)
    assert "workers = 2" in (tmp_path / "together" / "experiment.toml").read_text()


def test_two_agents_of_torchrun_that_meet_on_a_port(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    words = ["run", *flags(images, dtype="float64", clients=4), "--out"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agent = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meeting, "-m", "mpfedcl"]
    for _ in range(2):
        processes.append(start([*agent, *words, "together"], tmp_path))
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert call(*words, "alone", cwd=tmp_path).returncode == 0
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)


# When something goes wrong


def test_a_lost_worker_ends_the_run_and_the_rounds_before_are_kept(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    words = flags(images, dtype="float64", clients=4, rounds=100_000, evaluate_every=100_000)
    leader = start(command("run", *words, "--workers", 2, "--out", "run"), tmp_path)
    processes.append(leader)
    wait_for_rounds(tmp_path / "run", 3)
    (worker,) = children(leader)
    os.kill(worker, signal.SIGKILL)
    out, said = leader.communicate(timeout=60)
    assert (leader.returncode, out) == (1, "")
    assert said.count("\n") == 1
    assert "a worker was lost in round" in said
    assert "Go on with: mpfedcl run --resume run" in said
    done = len(read_records(tmp_path / "run"))
    assert done >= 3
    ended = call("run", "--resume", "run", "--rounds", done + 1, "--workers", 1, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    whole = flags(images, dtype="float64", clients=4, rounds=done + 1, evaluate_every=100_000)
    assert call("run", *whole, "--out", "whole", cwd=tmp_path).returncode == 0
    assert_close_results(tmp_path / "whole", tmp_path / "run", 1e-5)


def test_workers_end_when_the_leader_is_killed(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    leader, worker = start_two(images, tmp_path, processes)
    leader.kill()
    assert is_gone(worker)


def test_one_interrupt_ends_after_the_round_and_leaves_nobody(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    leader, worker = start_two(images, tmp_path, processes)
    # As a terminal does: to everybody.
    os.kill(worker, signal.SIGINT)
    leader.send_signal(signal.SIGINT)
    _, said = leader.communicate(timeout=60)
    assert leader.returncode == 130
    assert "Go on with: mpfedcl run --resume run" in said
    assert is_gone(worker)


def test_a_second_interrupt_ends_a_leader_that_waits(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """A worker that is stopped answers nobody; the leader is not to wait for it for hours."""
    leader, worker = start_two(images, tmp_path, processes)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.5)
    leader.send_signal(signal.SIGINT)
    time.sleep(0.2)
    leader.send_signal(signal.SIGINT)
    _, said = leader.communicate(timeout=30)
    assert leader.returncode == 130
    assert said.endswith("mpfedcl: stopped at once; what was done is kept.\n")
    assert is_gone(worker)


def test_an_interrupt_from_the_terminal_does_not_reach_workers(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    leader, worker = start_two(images, tmp_path, processes)
    assert os.getpgid(worker) != os.getpgid(leader.pid)


def test_the_meeting_point_of_one_machine_is_closed_to_others(
    images: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    leader, worker = start_two(images, tmp_path, processes)
    for process in (leader.pid, worker):
        assert listening_addresses(process) <= {"0100007F", "0" * 24 + "01000000"}


def test_scraps_of_a_schedulers_environment_start_no_team(images: Path, tmp_path: Path) -> None:
    words = ["run", *flags(images, clients=2), "--out", "run"]
    scraps = {"WORLD_SIZE": "4", "RANK": "1"}
    ended = call(*words, cwd=tmp_path, variables=scraps)
    assert ended.returncode == 0, ended.stderr


def test_only_the_command_run_goes_with_torchrun(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = call("compare", *flags(images), cwd=tmp_path, variables=place)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "compare was started by torchrun" in ended.stderr
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="started by torchrun to work for another"):
        run(small(images), tmp_path / "run")


def test_workers_find_modules_where_the_leader_does(images: Path, tmp_path: Path) -> None:
    """A method beside the script, imported by a path that is only right from there."""
    (tmp_path / "beside.py").write_text(
        "from mpfedcl.methods import Method\nclass Mine(Method):\n    pass\n"
    )
    words = ["run", *flags(images, method="beside:Mine", clients=4, workers=2), "--out", "run"]
    ended = call(*words, cwd=tmp_path, variables={"PYTHONPATH": "."})
    assert ended.returncode == 0, ended.stderr


def test_bad_input_is_one_sentence_with_workers_too(tmp_path: Path) -> None:
    ended = call("run", "--dataset.name", "nothing", "--workers", 2, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    root = tmp_path / "none"
    ended = call(
        "run", "--dataset.name", "folder", "--dataset.root", root, "--workers", 2, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    ended = call("run", "--workers", 0, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "workers is 0" in ended.stderr


def test_a_worker_whose_data_are_missing_says_so(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """Of two machines one may lack the data, which lie at the same place below each."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in range(2):
        machine = tmp_path / f"machine-{rank}"
        machine.mkdir()
        if rank == 0:
            save_images(machine / "data" / "a.npz")
        words = command("run", *flags(Path("data"), clients=4), "--out", "run")
        processes.append(start(words, machine, RANK=str(rank), LOCAL_RANK="0", **meeting))
    (_, leader), (_, other) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [1, 2]
    assert leader.startswith("mpfedcl: a worker was lost before the first round")
    assert other.startswith("mpfedcl: dataset.name is 'folder', but its folder data")
    assert leader.count("\n") == other.count("\n") == 1


def test_a_worker_that_never_begins_is_not_waited_for(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpfedcl.team.sys.executable", "/bin/false")
    with pytest.raises(LostWorker, match="ended with code 1 before it began"):
        run(small(images, workers=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Who gets whom


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 100), max_size=30),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=100)
def test_everyone_is_dealt_out_once_and_evenly(work: dict[str, int], size: int) -> None:
    shares = deal_clients(work, size)
    assert sorted(name for share in shares for name in share) == sorted(work)
    assert all(share == sorted(share) for share in shares)
    loads = [sum(work[name] for name in share) for share in shares]
    # Taking the largest first, no process is ahead of another by more than one client.
    assert max(loads) - min(loads) <= max(work.values(), default=0)


def test_the_deal_does_not_depend_on_the_order_of_names() -> None:
    work = {"b": 3, "a": 3, "c": 3, "d": 1}
    assert deal_clients(work, 2) == deal_clients(dict(reversed(work.items())), 2)
    assert deal_clients(work, 2) == [["a", "c"], ["b", "d"]]


def test_records_are_json_with_the_time_spent_waiting(images: Path, tmp_path: Path) -> None:
    run(small(images, workers=2), tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert all(record["seconds"]["exchange"] > 0 for record in records)
    assert json.dumps(read_summary(tmp_path / "run"))
