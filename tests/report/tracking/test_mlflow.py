"""What MLflow reads of a run, through its own client."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_processes import call
from command_results import without_progress
from mpfedcl import Experiment, resume, run
from mpfedcl.report.tracking import make_trackers, round_scalars
from mpfedcl.report.tracking.mlflow import metric_key
from mpfedcl.runs.observer import Observer
from small_experiments import Warnings, flags, read_records, save_images, small
from watched_network import in_view_of_the_network

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]


def connect(store: Path) -> Any:
    make_trackers(["mlflow"])  # It is told there what it must not do.
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store.as_uri())


def read_runs(store: Path) -> list[Any]:
    client = connect(store)
    group = client.get_experiment_by_name("mpfedcl")
    return list(client.search_runs([group.experiment_id], order_by=["start_time ASC"]))


def read_curve(store: Path, run_id: str, name: str) -> list[tuple[int, float]]:
    history = connect(store).get_metric_history(run_id, name)
    return [(each.step, each.value) for each in history]


def assert_told(store: Path, run_id: str, path: Path) -> None:
    """Hold MLflow's metrics to the run's records; times of rounds that were run twice aside."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(path):
        for name, value in round_scalars(record).items():
            expected.setdefault(name, []).append((record["round"], value))
    told = connect(store).get_run(run_id).data.metrics
    assert told.keys() == expected.keys()
    for name, curve in expected.items():
        found = read_curve(store, run_id, name)
        assert [step for step, _ in found] == [step for step, _ in curve], name
        if not name.startswith("seconds/"):
            assert found == curve, name


def stopped_after(rounds: int) -> Observer:
    done: list[Any] = []
    return Observer(on_round=done.append, should_stop=lambda: len(done) == rounds)


def test_a_run_on_the_embedded_digits_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = run(Experiment(rounds=2, track=("mlflow",)), path)
    (told,) = read_runs(path / "mlflow")
    assert told.info.status == "FINISHED"
    assert told.info.run_name == "run"
    assert_told(path / "mlflow", told.info.run_id, path)
    parameters = told.data.params
    for name, value in result.experiment.flattened():
        if not isinstance(value, tuple) and value is not None:
            assert parameters[name] == str(value)
    assert parameters["track"] == "mlflow"
    client = connect(path / "mlflow")
    artifacts = {each.path for each in client.list_artifacts(told.info.run_id)}
    assert artifacts == {
        "CARD.md", "experiment.toml", "model.safetensors", "models", "partition.json",
        "pool.safetensors", "rounds.jsonl", "summary.json",
    }  # fmt: skip
    for name in ("summary.json", "CARD.md", "models/client-3.safetensors"):
        copy = client.download_artifacts(told.info.run_id, name, str(tmp_path))
        assert Path(copy).read_bytes() == (path / name).read_bytes()


def test_a_resumed_run_replaces_its_mlflow_run(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images, rounds=3, track=("mlflow",)), path, stopped_after(2))
    (before,) = read_runs(path / "mlflow")
    assert before.info.status == "KILLED"
    # The newest checkpoint is lost: round 2 is told of, and will be run again.
    newest = max((path / "checkpoint").iterdir(), key=lambda each: each.name)
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    resume(path, 4)
    (after,) = read_runs(path / "mlflow")
    assert after.info.run_id != before.info.run_id
    assert after.info.status == "FINISHED"
    assert after.data.params["rounds"] == "4"
    assert_told(path / "mlflow", after.info.run_id, path)


def test_tracking_that_begins_late_has_all_rounds(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images), path)
    resume(path, 3, track=("mlflow",), track_to=tmp_path / "tracks")
    (told,) = read_runs(tmp_path / "tracks" / "mlflow")
    assert_told(tmp_path / "tracks" / "mlflow", told.info.run_id, path)


def test_a_store_that_was_removed_is_begun_anew(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(small(images, track=("mlflow",)), path)
    shutil.rmtree(path / "mlflow")
    # In another process: within one, MLflow remembers that it has made the store.
    ended = call("run", "--resume", path, "--rounds", 3, cwd=tmp_path, small_model=True)
    assert (ended.returncode, without_progress(ended.stderr)) == (0, "")
    (told,) = read_runs(path / "mlflow")
    assert_told(path / "mlflow", told.info.run_id, path)


def test_runs_share_a_store(images: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(small(images, track=("mlflow",), track_to=tmp_path), tmp_path / "runs" / name)
    runs = read_runs(tmp_path / "mlflow")
    assert [each.info.run_name for each in runs] == ["one", "two"]
    for each in runs:
        path = tmp_path / "runs" / each.info.run_name
        assert_told(tmp_path / "mlflow", each.info.run_id, path)


def test_hostile_client_names_are_told_apart(tmp_path: Path) -> None:
    for domain in ("a:b", "a b", "-..", "a*b", "класс"):
        save_images(tmp_path / "images" / f"{domain}.npz")
    experiment = small(tmp_path / "images", track=("mlflow",)).replace(
        partition__kind="feature", clients=None, partition__test="matched"
    )
    warnings = Warnings()
    run(experiment, tmp_path / "run", warnings.observer())
    assert warnings == []
    (told,) = read_runs(tmp_path / "run" / "mlflow")
    clients = [name for name in told.data.metrics if name.startswith("clients/")]
    assert len(clients) == 5
    assert "clients/a b" in clients


@given(st.text(min_size=1), st.text(min_size=1))
def test_any_name_becomes_a_key_of_its_own(one: str, other: str) -> None:
    from mlflow.utils import validation

    check: Any = validation._validate_metric
    keys = [metric_key(f"clients/{name.replace('/', '')}") for name in (one, other)]
    for key in keys:
        check(key, 0.0, 0, 1)
        assert len(key.encode()) < 200
    assert (keys[0] == keys[1]) == (one.replace("/", "") == other.replace("/", ""))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux")
def test_nothing_leaves_this_machine(images: Path, tmp_path: Path) -> None:
    words = [*flags(images, rounds=1, clients=2), "--track", "mlflow", "tensorboard"]
    ended = call("run", *words, "--out", "run", cwd=tmp_path, program=in_view_of_the_network)
    assert (ended.returncode, without_progress(ended.stderr)) == (0, "watched\n")
    assert read_runs(tmp_path / "run" / "mlflow")
