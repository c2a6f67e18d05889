"""How many runs are made at the same time, and in which order."""

from pathlib import Path
from typing import Any, Literal

import pytest

from mpfedcl import Experiment, InvalidInput
from mpfedcl.studies import jobs
from mpfedcl.studies.jobs import PlannedRun, count_jobs, order_runs

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "workers", "cores", "free", "expected"),
    [
        ("auto", 1, 8, 64 * GIB, 8),
        ("auto", "auto", 8, 64 * GIB, 8),
        ("auto", 2, 8, 64 * GIB, 4),
        ("auto", 3, 8, 64 * GIB, 2),
        ("auto", 16, 8, 64 * GIB, 1),
        ("auto", 1, 8, 3 * GIB, 3),
        ("auto", 1, 8, GIB // 2, 1),
        ("auto", 1, 1, 64 * GIB, 1),
        (5, 1, 8, 64 * GIB, 5),
        (200, 1, 2, 64 * GIB, 2),
        (5, 1, 8, GIB, 4),
        (5, 1, 8, GIB // 8, 1),
    ],
)
def test_cores_workers_and_memory_bound_the_jobs(
    asked: int | Literal["auto"],
    workers: int | Literal["auto"],
    cores: int,
    free: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "usable_cores", lambda: cores)
    monkeypatch.setattr(jobs, "usable_memory", lambda: free)
    assert count_jobs(asked, workers) == expected


def test_fewer_than_one_job_is_refused() -> None:
    for jobs_asked in (0, -1):
        with pytest.raises(InvalidInput, match=f"jobs is {jobs_asked};"):
            count_jobs(jobs_asked)


def plan(name: str, **changes: Any) -> PlannedRun:
    return PlannedRun(Experiment().replace(**changes), Path(name))


def test_runs_on_the_same_data_follow_each_other_and_the_longest_come_first() -> None:
    planned = [
        plan("exchange", method="fedgauss", rounds=1, seed=0),
        plan("a0", method="fedavg", rounds=5, seed=0),
        plan("a1", method="fedavg", rounds=5, seed=1),
        plan("b0", method="local", rounds=5, seed=0, train__lr=0.5),
        plan("b1", method="local", rounds=5, seed=1, engine="loop"),
        plan("long", method="local", rounds=9, seed=1),
    ]
    names = [str(each.path) for each in order_runs(planned)]
    assert names == ["long", "a0", "b0", "a1", "b1", "exchange"]
