"""Several processes for one experiment: the same result."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import main as torchrun

from command_processes import CommandProcess, call
from mpfedcl import Experiment, resume, run
from mpfedcl.engines.hardware import usable_cores
from small_experiments import (
    EXAMPLES,
    HIDDEN,
    METHODS,
    assert_close_results,
    flags,
    read_records,
    read_summary,
    small,
)
from worker_processes import free_port, run_together

pytestmark = pytest.mark.whole


BOUNDED = {"validation__bounds": "on", "validation__clip_factor": 0.8}
ROBUST = BOUNDED | {
    "aggregation__rule": "geometric-median",
    "update__clip": 0.05,
}
MATCHED = BOUNDED | {"partition__test": "matched", "systems__kind": "tiers", "systems__up": 1e3}


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("method", "changes"),
    [*((method, {}) for method in METHODS), ("mp-fedcl", ROBUST), ("fedgauss", MATCHED)],
)
def test_two_workers_equal_one_process(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    experiment = small_run(images, method).replace(**changes)
    alone = run(experiment.replace(engine="loop"), tmp_path / "alone").path
    together = run(experiment.replace(workers=2), tmp_path / "together").path
    assert_same_run(alone, together)


@pytest.mark.parametrize(
    ("method", "changes"), [("fedproto", {}), ("mp-fedcl", ROBUST), ("fedgauss", MATCHED)]
)
def test_two_processes_of_torchrun_equal_one_process(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    experiment = small_run(images, method).replace(**changes)
    alone = run(experiment.replace(engine="loop"), tmp_path / "alone").path
    (tmp_path / "settings.toml").write_text(experiment.to_toml())
    run_together(["run", "settings.toml", "--out", "together"], tmp_path, 2)
    assert_same_run(alone, tmp_path / "together")


def small_run(images: Path, method: str) -> Experiment:
    experiment = small(images, method, dtype="float64", rounds=3, clients=5, fraction=0.8)
    return experiment.replace(model__hidden=HIDDEN)


def assert_same_run(alone: Path, together: Path) -> None:
    assert_close_results(alone, together, 1e-5)
    for name in ("predictors", "accuracy_per_client"):
        assert read_summary(together)[name] == read_summary(alone)[name]
    assert (alone / "confusion.json").read_bytes() == (together / "confusion.json").read_bytes()
    for name in ("bytes", "clients", "sent", "processed"):
        reported = [[each[name] for each in read_records(path)] for path in (together, alone)]
        assert reported[0] == reported[1]
    clocks = [[r.get("virtual_seconds") for r in read_records(path)] for path in (together, alone)]
    assert clocks[0] == clocks[1]
    # The waiting times are recorded.
    assert all(each["seconds"]["exchange"] > 0 for each in read_records(together))


def test_single_precision_round_of_two_processes_equals_the_loop(
    images: Path, tmp_path: Path
) -> None:
    experiment = small(images, rounds=1, clients=5)
    run(experiment.replace(engine="loop"), tmp_path / "alone")
    (tmp_path / "settings.toml").write_text(experiment.to_toml())
    run_together(["run", "settings.toml", "--out", "together"], tmp_path, 2)
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)


def test_process_of_torchrun_may_have_no_clients(images: Path, tmp_path: Path) -> None:
    experiment = small(images, dtype="float64", clients=2).replace(model__hidden=HIDDEN)
    run(experiment, tmp_path / "alone")
    (tmp_path / "settings.toml").write_text(experiment.to_toml())
    run_together(["run", "settings.toml", "--out", "together"], tmp_path, 3)
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)


def test_two_hundred_workers_are_not_started(images: Path, tmp_path: Path) -> None:
    words = ["run", *flags(images, clients=2, dtype="float64"), "--out", "run", "--workers", 200]
    ended = call(*words, cwd=tmp_path, forked_workers=True)
    assert ended.returncode == 0, ended.stderr
    count = min(2, usable_cores())
    assert f"workers is 200; the run has {count}" in ended.stderr
    assert f"workers = {count}" in (tmp_path / "run" / "experiment.toml").read_text()


@pytest.mark.usefixtures("example_methods", "small_model")
@pytest.mark.parametrize("method", ["fedproto", "custom_method:Scaffold"])
def test_resume_with_another_number_of_workers(images: Path, tmp_path: Path, method: str) -> None:
    """Check that client states reach the process that has the client after the resume."""
    shutil.copy(EXAMPLES / "custom_method.py", tmp_path)
    experiment = small(images, method, dtype="float64", rounds=4, clients=4)
    run(experiment.replace(engine="loop"), tmp_path / "whole")
    run(experiment.replace(rounds=2), tmp_path / "parts")
    words = ["run", "--resume", "parts", "--method", method, "--rounds", 3]
    run_together(words, tmp_path, 2, small_model=True)
    assert "workers = 2" in (tmp_path / "parts" / "experiment.toml").read_text()
    resume(tmp_path / "parts", rounds=4, workers=1, engine="loop")
    assert_close_results(tmp_path / "whole", tmp_path / "parts", 1e-5)


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of one process that the processes of torchrun are compared with."""
    cwd = tmp_path_factory.mktemp("alone")
    assert call(*torchrun_words(images), "alone", cwd=cwd).returncode == 0
    return cwd / "alone"


def torchrun_words(images: Path) -> list[str]:
    return ["run", *flags(images, dtype="float64", clients=4), "--out"]


@pytest.mark.thorough
def test_torchrun_with_two_processes_equals_one_process(
    images: Path, alone: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    # The program of torch is forked; the two processes that it starts are not.
    place = ["--standalone", "--nproc-per-node", 2, "-m", "mpfedcl"]
    words = [*place, *torchrun_words(images), "together"]
    commands.append(CommandProcess(words, tmp_path, program=torchrun))
    out, err = commands[0].communicate()
    assert commands[0].returncode == 0, err
    # Only one of them prints.
    assert out.count("mean over clients") == 1
    assert_close_results(alone, tmp_path / "together", 1e-5)
    assert "workers = 2" in (tmp_path / "together" / "experiment.toml").read_text()


@pytest.mark.thorough
def test_two_torchrun_agents_share_a_rendezvous_port(
    images: Path, alone: Path, tmp_path: Path, commands: list[CommandProcess]
) -> None:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agent = ["--nnodes", 2, "--nproc-per-node", 1, *meeting, "-m", "mpfedcl"]
    for _ in range(2):
        words = [*agent, *torchrun_words(images), "together"]
        commands.append(CommandProcess(words, tmp_path, program=torchrun))
    output = [process.communicate() for process in commands]
    assert [process.returncode for process in commands] == [0, 0], output
    assert_close_results(alone, tmp_path / "together", 1e-5)
