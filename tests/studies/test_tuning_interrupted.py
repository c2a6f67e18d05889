"""Searches that are stopped or killed, and gone on with."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpfedcl.runs.run_loop import Observer
from mpfedcl.runs.simulation import resume
from mpfedcl.studies.jobs import Plan, run_plans
from mpfedcl.studies.tuning import Search, load_tuning, run_searches, tune
from searches import BUDGET, ROUNDS, load, without_seconds, words
from small_runs import command, environment, small

pytestmark = pytest.mark.whole


def test_stopped_between_rounds_and_gone_on_with(images: Path, tuned: Path, tmp_path: Path) -> None:
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
        assert load_tuning(path) is None
        assert attempts < 50
    assert attempts > 3
    whole = load(tuned / "mp-fedcl")
    assert found.trials == whole.trials
    assert (found.chosen, found.rounds_run) == (whole.chosen, whole.rounds_run)


def test_killed_before_the_first_round_of_a_rung(images: Path, tuned: Path, tmp_path: Path) -> None:
    """The run then says more rounds than it has, and its summary is gone."""
    path, base = tmp_path / "killed", small(images, rounds=ROUNDS)
    search = Search.prepare(base, "fedavg", path, BUDGET)
    search.write()
    while search.due()[0].experiment.rounds < ROUNDS:
        assert run_plans(search.due(), 1, lambda: False, lambda: None)
    plan = search.due()[0]
    resume(plan.path, ROUNDS, Observer(should_stop=lambda: True))
    assert plan.summary() is None
    assert plan.rounds_done() == 2
    assert not plan.is_done()
    assert Plan(plan.experiment.replace(rounds=2), plan.path).is_done()
    found = tune(base, "fedavg", path, budget=BUDGET)
    assert found is not None
    assert found.trials == load(tuned / "fedavg").trials


def test_weights_are_dropped_in_the_end(tuned: Path) -> None:
    assert [*tuned.rglob("*.safetensors"), *tuned.rglob("checkpoint")] == []
    assert len([*tuned.rglob("rounds.jsonl")]) == 2 * BUDGET


def test_a_kill_with_two_jobs(images: Path, tuned: Path, tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    line = command(*words(images, path))
    line[line.index("--jobs") + 1] = "2"
    with subprocess.Popen(line, env=environment(), stdout=-3, stderr=-3) as process:
        deadline = time.monotonic() + 60
        while count_rounds(path) < 5 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert without_seconds(path) == without_seconds(tuned)


def count_rounds(path: Path) -> int:
    return sum(each.read_bytes().count(b"\n") for each in path.glob("*/*/rounds.jsonl"))


def test_ctrl_c(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    line = command(*words(images, path, rounds=4000))
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while count_rounds(path) < 1:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert f"The same command with --out {path} goes on" in " ".join(err.split())


def test_searches_side_by_side(images: Path, tmp_path: Path) -> None:
    searches = [
        Search.prepare(small(images, rounds=rounds), method, tmp_path / method, 2)
        for method, rounds in (("local", 1), ("fedavg", 3))
    ]
    assert run_searches(searches, 1, lambda: False, lambda: None)
    assert [search.due() for search in searches] == [[], []]
    assert sum(s.rounds_done() for s in searches) <= sum(s.most_rounds for s in searches)
    assert [len(search.conclude().trials) for search in searches] == [2, 2]


def test_plans_that_are_there_are_gone_on_with(images: Path, tmp_path: Path) -> None:
    plans = [Plan(small(images, "local", rounds=n).resolved(), tmp_path / "run") for n in (1, 3, 2)]
    for plan, done in zip(plans, (1, 3, 3), strict=True):
        assert run_plans([plan], 1, lambda: False, lambda: None)
        assert plan.rounds_done() == done
