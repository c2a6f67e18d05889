"""Real processes, real signals: kill -9, Ctrl-C, two at once, a full disk."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_processes import (
    CommandProcess,
    call,
    command,
    environment,
    into_a_closed_pipe,
    into_a_full_disk,
)
from mpfedcl import resume, run
from mpfedcl.cli.main import main
from small_experiments import assert_same_run, flags, small
from worker_processes import start as begin

pytestmark = pytest.mark.whole

ROUNDS = 24
Process = CommandProcess | subprocess.Popen[str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start `mpfedcl` with the words given; what still runs when the test ends is killed."""
    started: list[Process] = []

    def begin(*words: object, small_model: bool = False) -> Process:
        started.append(CommandProcess(words, tmp_path, small_model=small_model))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], process: Process, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def rounds_done(path: Path) -> int:
    records = path / "rounds.jsonl"
    return len(records.read_bytes().splitlines()) if records.exists() else 0


def ended(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate()
    assert "Traceback" not in err
    return process.wait(), out, err


# After which round and how many seconds later: odd numbers, so that the signal falls anywhere.
MOMENTS = {"mp-fedcl": ((1, 0.0037), (9, 0.0113)), "fedproto": ((5, 0.0061),)}


@pytest.mark.parametrize("method", MOMENTS)
def test_run_killed_at_any_moment_resumes_bit_identically(
    images: Path, tmp_path: Path, start: Callable[..., Process], method: str
) -> None:
    path = tmp_path / "killed"
    process = start("run", *flags(images, method=method, rounds=ROUNDS), "--out", path)
    for wanted, delay in MOMENTS[method]:
        wait_until(lambda at_least=wanted: rounds_done(path) >= at_least, process)  # type: ignore[misc]
        time.sleep(delay)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it was over before it could be killed"
        assert rounds_done(path) < ROUNDS
        process = start("run", "--resume", path)
    assert ended(process)[0] == 0
    run(small(images, method, rounds=ROUNDS), tmp_path / "whole")
    assert_same_run(path, tmp_path / "whole")


@pytest.mark.thorough
@pytest.mark.usefixtures("small_model")
def test_run_killed_before_the_first_round_is_resumed(
    images: Path, tmp_path: Path, start: Callable[..., Process]
) -> None:
    path = tmp_path / "killed"
    words = ["run", *flags(images, train__epochs=60), "--out", path]
    process = start(*words, small_model=True)
    wait_until(lambda: (path / "experiment.toml").exists(), process)
    process.kill()
    process.communicate()
    assert rounds_done(path) == 0
    result = resume(path)
    assert [record["round"] for record in result.history] == [1, 2]


def test_first_ctrl_c_ends_after_the_round(
    images: Path, tmp_path: Path, start: Callable[..., Process]
) -> None:
    path = tmp_path / "stopped"
    process = start("run", *flags(images, rounds=ROUNDS), "--out", path)
    wait_until(lambda: rounds_done(path) >= 2, process)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == 130
    assert out == ""
    assert 2 <= rounds_done(path) < ROUNDS
    assert f"Stopped after round {rounds_done(path)} of {ROUNDS}" in " ".join(err.split())
    assert "--resume" in err
    assert not (path / "summary.json").exists()
    resume(path)
    run(small(images, rounds=ROUNDS), tmp_path / "whole")
    assert_same_run(path, tmp_path / "whole")


@pytest.mark.thorough
def test_second_ctrl_c_ends_at_once_and_the_folder_is_locked_until_then(
    images: Path,
    tmp_path: Path,
    processes: list[subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "stopped"
    # A round of many seconds.
    words = command("run", *flags(images, rounds=2, train__epochs=20_000, workers=1), "--out", path)
    process = begin(words, tmp_path)
    processes.append(process)
    wait_until(lambda: (path / "partition.json").exists(), process)

    for words in (["--resume", str(path)], [*flags(images), "--out", str(path)]):
        with pytest.raises(SystemExit) as end:
            main(["run", *words])
        assert end.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "another process is writing this run" in said.err
    assert process.poll() is None

    process.send_signal(signal.SIGINT)
    # Two signals that arrive together are one.
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, out, err = ended(process)
    assert code == 130
    assert time.monotonic() - began < 60
    assert out == ""
    assert "mpfedcl: stopped at once" in err
    assert rounds_done(path) == 0

    # The lock went with the process, and the run can be gone on with.
    file = path / "experiment.toml"
    file.write_text(file.read_text().replace("epochs = 20000", "epochs = 2"))
    assert resume(path).accuracy is not None


def test_one_of_two_processes_in_a_folder_is_rejected(
    images: Path, tmp_path: Path, start: Callable[..., Process]
) -> None:
    path = tmp_path / "one"
    words = ("run", *flags(images, rounds=4), "--out", path, "--json")
    outcomes = sorted(ended(process) for process in [start(*words), start(*words)])
    assert [code for code, _, _ in outcomes] == [0, 2]
    _, out, err = outcomes[1]
    assert out == ""
    assert err.startswith("mpfedcl: out is ")
    assert err.count("\n") == 1
    run(small(images, rounds=4), tmp_path / "whole")
    assert_same_run(path, tmp_path / "whole")


def test_full_disk_at_the_start_is_a_one_line_error(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    ended = call("run", *flags(images), "--out", path, cwd=tmp_path, file_size=100)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("mpfedcl: ")
    assert ended.stderr.count("\n") == 1
    assert "File too large" in ended.stderr
    # Nothing is in the way of a second try.
    run(small(images), path)
    run(small(images), tmp_path / "whole")
    assert_same_run(path, tmp_path / "whole")


def test_run_on_a_disk_that_fills_up_can_be_resumed(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    ended = call("run", *flags(images), "--out", path, cwd=tmp_path, file_size=1_000_000)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("mpfedcl: ")
    assert ended.stderr.count("\n") == 1
    assert "File too large" in ended.stderr
    # Half a file would keep the disk full.
    assert [each for each in path.rglob("*") if each.stat().st_size > 100_000] == []
    resume(path)
    run(small(images), tmp_path / "whole")
    assert_same_run(path, tmp_path / "whole")


def test_full_disk_behind_standard_output_is_a_one_line_error(tmp_path: Path) -> None:
    ended = call("methods", "--json", cwd=tmp_path, program=into_a_full_disk)
    assert ended.returncode == 2
    assert ended.stderr.startswith("mpfedcl: ")
    assert ended.stderr.count("\n") == 1
    assert "No space left" in ended.stderr


def test_closed_pipe_prints_no_error(tmp_path: Path) -> None:
    ended = call("methods", cwd=tmp_path, program=into_a_closed_pipe)
    assert ended.returncode != 0
    assert ended.stderr == ""


@pytest.mark.thorough
def test_closed_pipe_of_a_separate_process_prints_no_error(tmp_path: Path) -> None:
    """What Python itself does when it ends must stay silent, too."""
    predictor, writing = os.pipe()
    os.close(predictor)
    with os.fdopen(writing, "w") as pipe:
        ended = subprocess.run(
            command("methods", "--json"),
            cwd=tmp_path,
            env=environment(),
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode != 0
    assert ended.stderr == ""
