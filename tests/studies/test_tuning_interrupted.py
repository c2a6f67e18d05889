"""Searches that are stopped or killed, and resumed."""

import signal
import time
from pathlib import Path

import pytest

from command_processes import CommandProcess
from command_results import without_progress
from mpfedcl import resume
from mpfedcl.api import run_or_resume, tune
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer
from mpfedcl.studies.jobs import JobOptions, PlannedRun, run_planned
from mpfedcl.studies.tuning import Search, run_searches
from small_experiments import Say, small
from tuning_command import BUDGET, ROUNDS, load, without_seconds, words

pytestmark = pytest.mark.whole


def test_stopped_between_rounds_and_resumed(images: Path, tuned: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    base = small(images, rounds=ROUNDS)
    seen: list[int] = []

    def stop_now_and_then() -> bool:
        seen.append(1)
        return len(seen) % 7 == 0

    attempts = 0
    while (
        found := tune(base, "mp-fedcl", path, budget=BUDGET, should_stop=stop_now_and_then)
    ) is None:
        attempts += 1
        assert not (path / "tuning.json").exists()
        assert attempts < 50
    assert attempts > 3
    whole = load(tuned / "mp-fedcl")
    assert found.trials == whole.trials
    assert (found.chosen, found.rounds_run) == (whole.chosen, whole.rounds_run)


def test_killed_before_the_first_round_of_a_rung(images: Path, tuned: Path, tmp_path: Path) -> None:
    """The run then says more rounds than it has, and its summary is gone."""
    path, base = tmp_path / "killed", small(images, rounds=ROUNDS)
    search = Search.prepare(base, "fedavg", path, BUDGET)
    while search.due_runs()[0].experiment.rounds < ROUNDS:
        assert run_planned(search.due_runs(), JobOptions(run_or_resume))
    planned = search.due_runs()[0]
    resume(planned.path, ROUNDS, Observer(should_stop=lambda: True))
    assert RunDirectory(planned.path).read_summary() is None
    assert planned.rounds_done() == 2
    assert not planned.is_done()
    assert PlannedRun(planned.experiment.replace(rounds=2), planned.path).is_done()
    found = tune(base, "fedavg", path, budget=BUDGET)
    assert found is not None
    assert found.trials == load(tuned / "fedavg").trials


def test_weights_are_deleted_at_the_end(tuned: Path) -> None:
    assert [*tuned.rglob("*.safetensors"), *tuned.rglob("checkpoint")] == []
    assert len([*tuned.rglob("rounds.jsonl")]) == 2 * BUDGET


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_jobs")
def test_kill_with_two_jobs_is_resumed(
    images: Path, tuned: Path, tmp_path: Path, said: Say
) -> None:
    path = tmp_path / "jobs"
    line = words(images, path)
    line[line.index("--jobs") + 1] = "2"
    process = CommandProcess(line, tmp_path, forked_jobs=True)
    deadline = time.monotonic() + 120
    while count_rounds(path) < 5 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    code, _, err = said(*line)
    assert (code, without_progress(err)) == (0, "")
    assert without_seconds(path) == without_seconds(tuned)


def count_rounds(path: Path) -> int:
    return sum(each.read_bytes().count(b"\n") for each in path.glob("*/*/rounds.jsonl"))


def test_ctrl_c_stops_a_search_that_can_be_resumed(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    process = CommandProcess(words(images, path, rounds=4000), tmp_path)
    deadline = time.monotonic() + 120
    while count_rounds(path) < 1:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert f"The same command with --out {path} continues" in " ".join(err.split())


def test_searches_run_in_parallel(images: Path, tmp_path: Path) -> None:
    searches = [
        Search.prepare(small(images, rounds=rounds), method, tmp_path / method, 2)
        for method, rounds in (("local", 1), ("fedavg", 3))
    ]
    assert run_searches(searches, JobOptions(run_or_resume))
    assert [search.due_runs() for search in searches] == [[], []]
    assert sum(s.rounds_done() for s in searches) <= sum(s.most_rounds for s in searches)
    assert [len(search.collect_result().trials) for search in searches] == [2, 2]


def test_existing_runs_are_resumed(images: Path, tmp_path: Path) -> None:
    planned_runs = [
        PlannedRun(small(images, "local", rounds=n).resolved(), tmp_path / "run") for n in (1, 3, 2)
    ]
    for planned, done in zip(planned_runs, (1, 3, 3), strict=True):
        assert run_planned([planned], JobOptions(run_or_resume))
        assert planned.rounds_done() == done
