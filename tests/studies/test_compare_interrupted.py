"""Comparisons that are stopped or killed, and resumed."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from command_processes import CommandProcess, forked_from_server
from command_results import without_progress
from comparison_command import RUNS, modified, words
from mpfedcl.api import run_or_resume
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions
from small_experiments import HIDDEN, Say, assert_same_run, small

pytestmark = pytest.mark.whole


def test_complete_runs_are_not_repeated(images: Path, compared: Path, said: Say) -> None:
    before = {name: modified(compared / name) for name in RUNS}
    assert said(*words(images, compared))[0] == 0
    assert {name: modified(compared / name) for name in RUNS} == before


def test_interrupted_comparison_is_resumed(
    images: Path, compared: Path, tmp_path: Path, said: Say
) -> None:
    path = tmp_path / "broken"
    shutil.copytree(compared, path)
    # One run was never begun, one stopped after a round, one before its summary.
    shutil.rmtree(path / "fedavg-seed1")
    for name in ("local-seed0", "mp-fedcl-seed1"):
        (path / name / "summary.json").unlink()
    for suffix in (".json", ".safetensors"):
        (path / "local-seed0" / "checkpoint" / f"round-000002{suffix}").unlink()
    whole = [name for name in RUNS if (path / name / "summary.json").exists()]
    before = {name: modified(path / name) for name in whole}
    assert len(before) == 3
    assert said(*words(images, path))[0] == 0
    for name in RUNS:
        assert_same_run(path / name, compared / name)
    assert {name: modified(path / name) for name in whole} == before


def test_stop_between_runs(images: Path, tmp_path: Path) -> None:
    base = small(images, rounds=1)
    comparison = Comparison.prepare(base, ["fedavg", "local"], [0, 1], tmp_path / "out")
    rounds: list[int] = []
    finished = comparison.run(
        JobOptions(
            run_or_resume,
            1,
            lambda: len(rounds) == 3,
            lambda: rounds.append(comparison.rounds_done()),
        )
    )
    assert not finished
    assert rounds == [1, 2, 3]
    assert comparison.run(JobOptions(run_or_resume))
    assert comparison.rounds_done() == 4


@pytest.mark.thorough
def test_kill_with_several_jobs_leaves_no_orphans(
    images: Path, compared: Path, tmp_path: Path, said: Say
) -> None:
    path = tmp_path / "jobs"
    process = CommandProcess(two_jobs(words(images, path)), tmp_path)
    deadline = time.monotonic() + 120
    while not list(path.glob("*/summary.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = [
        int(each)
        for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert len(children) >= 2
    deadline = time.monotonic() + 120
    while any(is_alive(child) for child in children):
        assert time.monotonic() < deadline, "a process of the comparison outlived it"
        time.sleep(0.05)

    # Searches are gone on with by two jobs, in test_tuning_interrupted; here one does.
    code, _, err = said(*words(images, path))
    assert (code, without_progress(err)) == (0, "")
    for name in RUNS:
        assert_same_run(path / name, compared / name)


def two_jobs(line: list[str]) -> list[str]:
    place = line.index("--jobs") + 1
    return [*line[:place], "2", *line[place + 1 :]]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ctrl_c_stops_all_jobs_after_their_round(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    endless = {"rounds": 5000, "evaluate_every": 100, "model__hidden": HIDDEN}
    line = two_jobs(words(images, path, **endless))
    others = forked_from_server()
    process = CommandProcess(line, tmp_path, forked_jobs=True)
    try:
        deadline = time.monotonic() + 120
        while len([each for each in path.glob("*/rounds.jsonl") if each.stat().st_size]) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # As a terminal does: to every process.
        started = set(forked_from_server()) - {*others}
        assert len(started) == 3
        for each in started:
            os.kill(each, signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
    assert not started & set(forked_from_server())
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "continues where it stopped" in " ".join(err.split())
    assert len(list(path.iterdir())) == 2
