"""The number of workers of a run: a rule of sizes, cores and memory."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from mpfedcl import Experiment, resume, run
from mpfedcl.methods import find_method
from mpfedcl.runs import worker_count
from mpfedcl.runs.observer import Observer
from mpfedcl.runs.worker_count import (
    RunSize,
    choose_workers,
    measure_run,
    share_cores,
)
from small_experiments import HIDDEN, assert_close_results, small


@pytest.mark.parametrize(
    ("clients", "seconds", "num_bytes", "cores", "number"),
    [
        (5, 7.9, 10**6, 64, 1),
        (5, 8.0, 10**6, 2, 2),
        (5, 100, 10**6, 64, 5),
        (1000, 100, 10**6, 64, 64),
        (1, 100, 10**6, 64, 1),
        # Half of 16 GB holds the samples three times.
        (1000, 100, 2.6 * 10**9, 64, 3),
        (1000, 100, 10**12, 64, 1),
        # 16 GB hold 66 processes with nearly no samples.
        (1000, 100, 10**6, 1000, 66),
    ],
)
def test_number_of_workers_depends_on_cores_clients_and_memory(
    clients: int, seconds: float, num_bytes: float, cores: int, number: int
) -> None:
    assert share_cores(RunSize(clients, seconds, int(num_bytes)), cores, 16 * 10**9) == number


def long(**changes: Any) -> Experiment:
    """Return an experiment of some minutes on the embedded digits."""
    method = str(changes.get("method", "fedavg"))
    return Experiment(rounds=500).replace(**{"method": method, **changes}).resolved()


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "usable_cores", lambda: 4)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 4),
        ({"fraction": 0.4}, 2),
        ({"workers": 3}, 3),
        ({"rounds": 3}, 1),
        ({"method": "fedasync", "systems__kind": "lognormal"}, 1),
        ({"secure_aggregation": True}, 1),
        ({"device": "cuda"}, 1),
    ],
)
def test_workers_depend_on_the_settings(changes: dict[str, Any], count: int) -> None:
    assert choose_workers(long(**changes)) == count


@pytest.mark.usefixtures("four_cores")
def test_threads_reduce_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_workers(long()) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert choose_workers(long()) == 1


@pytest.mark.usefixtures("four_cores")
def test_memory_of_the_container_limits_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process takes 241 MB, and the digits 9.4 MB in each.
    for free, count in ((40, 1), (600, 2), (10_000, 4)):
        monkeypatch.setattr(worker_count, "usable_memory", lambda free=free: free * 10**6)
        assert choose_workers(long()) == count
        assert choose_workers(long(workers=200)) == count


@pytest.mark.usefixtures("four_cores")
def test_run_next_to_others_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    assert choose_workers(long()) == 1


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("asked", "clients", "count"), [(3, 5, 3), (200, 5, 4), (200, 2, 2), (3, 1, 1), (1, 5, 1)]
)
def test_workers_are_limited_to_cores_and_clients(asked: int, clients: int, count: int) -> None:
    assert choose_workers(long(workers=asked, clients=clients)) == count


def test_sizes_are_known_before_samples_are_opened(images: Path) -> None:
    found = measure_run(small(images, "fedavg").resolved(), find_method("fedavg"))
    assert found is not None
    assert found.clients == 3
    assert found.seconds < 0.2
    digits = measure_run(long(rounds=60), find_method("fedavg"))
    # 2,000 digits, three times through 800,000 weights, in 60 rounds.
    assert digits is not None
    assert digits.seconds == pytest.approx(60 * 2000 * (3 * 795_000 / 1e10 + 2e-5), rel=0.01)
    assert digits.num_bytes == 4 * 3000 * 784
    table = Experiment().replace(dataset__name="table", dataset__root=Path("none"))
    assert measure_run(table, find_method("fedavg")) is None


@pytest.mark.whole
@pytest.mark.usefixtures("forked_workers", "four_cores")
def test_chosen_workers_are_reported_and_recorded(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_count, "LEAST_SECONDS", 0.0)
    said: list[str] = []
    experiment = small(
        images, clients=2, rounds=1, workers="auto", dtype="float64", model__hidden=HIDDEN
    )
    run(experiment, tmp_path / "run", Observer(on_warning=said.append))
    assert "workers is auto; the run has 2." in said
    assert "workers = 2" in (tmp_path / "run" / "experiment.toml").read_text()
    run(experiment.replace(workers=1), tmp_path / "alone")
    assert_close_results(tmp_path / "run", tmp_path / "alone", 1e-5)
    # The number on record is kept.
    monkeypatch.setattr(worker_count, "LEAST_SECONDS", 1e9)
    assert resume(tmp_path / "run", rounds=2).experiment.workers == 2


@pytest.mark.usefixtures("small_model", "four_cores")
def test_run_continues_alone_if_no_worker_starts(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_count, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr("mpfedcl.runs.simulation._WORKER", "mpfedcl.no_such_module")
    said: list[str] = []
    result = run(
        small(images, rounds=1, workers="auto"), tmp_path / "run", Observer(on_warning=said.append)
    )
    assert result.experiment.workers == 1
    assert any("others could not be started" in each for each in said)
