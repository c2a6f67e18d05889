"""The run directory: every file and every key of the contract, and the same bytes every time."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mpfedcl import Experiment, RunResult, run
from mpfedcl.core.files import FORMAT
from mpfedcl.methods import PREDICTORS
from mpfedcl.runs.observer import Observer
from small_experiments import (
    METHODS,
    PHASES,
    assert_same_results,
    assert_same_run,
    read_records,
    read_summary,
    results_of,
    small,
    without_timings,
)

pytestmark = pytest.mark.whole

CLIENTS = ["client-0", "client-1", "client-2"]


@pytest.fixture(scope="module")
def runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """A run of each method."""
    root = tmp_path_factory.mktemp("runs")
    return {method: run(small(images, method), root / method) for method in METHODS}


@pytest.fixture(params=METHODS)
def result(request: pytest.FixtureRequest, runs: dict[str, RunResult]) -> RunResult:
    return runs[request.param]


def shares_model(result: RunResult) -> bool:
    return result.experiment.method not in ("local", "fedproto")


def shares_prototypes(result: RunResult) -> bool:
    return result.experiment.method in ("fedproto", "sp-fedcl", "dp-fedcl", "mp-fedcl")


# Files


def test_run_directory_has_the_expected_files(result: RunResult) -> None:
    found = {each.name for each in result.path.iterdir() if not each.name.startswith(".")}
    wanted = {"experiment.toml", "rounds.jsonl", "summary.json", "models", "checkpoint"}
    wanted |= {"partition.json", "confusion.json", "calibration.json", "CARD.md"}
    wanted |= {"model.safetensors"} if shares_model(result) else set()
    wanted |= {"pool.safetensors"} if shares_prototypes(result) else set()
    assert found == wanted


def test_personal_models_have_the_expected_tensors(result: RunResult) -> None:
    names = sorted(each.name for each in (result.path / "models").iterdir())
    assert names == [f"{client}.safetensors" for client in CLIENTS]
    for name in names:
        params = load_file(result.path / "models" / name)
        shapes = {parameter: list(value.shape) for parameter, value in params.items()}
        assert shapes == {
            "hidden.0.weight": [512, 36],
            "hidden.0.bias": [512],
            "hidden.1.weight": [512, 512],
            "hidden.1.bias": [512],
            "hidden.2.weight": [256, 512],
            "hidden.2.bias": [256],
            "classifier.weight": [3, 256],
            "classifier.bias": [3],
        }
        assert all(value.dtype == torch.float32 for value in params.values())
        assert all(bool(value.isfinite().all()) for value in params.values())


def test_global_model_is_the_mean_of_the_personal_ones(runs: dict[str, RunResult]) -> None:
    path = runs["mp-fedcl"].path
    partition = json.loads((path / "partition.json").read_text())
    averaged = load_file(path / "model.safetensors")
    for name, value in averaged.items():
        wanted = sum(
            load_file(path / "models" / f"{client}.safetensors")[name].double()
            * (sum(partition["clients"][client]["train"]) / 60)
            for client in CLIENTS
        )
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-7)


def test_pool_of_a_run_is_read_back(result: RunResult) -> None:
    if not shares_prototypes(result):
        assert result.pool is None
        return
    with safe_open(result.path / "pool.safetensors", framework="pt") as file:
        names = json.loads(file.metadata()["names"])
        pool = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  -- no mapping
    assert names == CLIENTS
    count = len(pool["vectors"])
    assert pool["vectors"].shape == (count, 256)
    for column in ("labels", "counts", "owners"):
        assert pool[column].shape == (count,)
        assert pool[column].dtype == torch.int64
    assert sorted(pool) == ["counts", "labels", "owners", "vectors"]
    assert set(pool["labels"].tolist()) <= {0, 1, 2}
    # Together a client's prototypes stand for all its images, class by class.
    partition = json.loads((result.path / "partition.json").read_text())
    for owner, client in enumerate(names):
        for label in range(3):
            rows = (pool["owners"] == owner) & (pool["labels"] == label)
            held = partition["clients"][client]["train"][label]
            assert int(pool["counts"][rows].sum()) == held
            if result.experiment.method in ("fedproto", "sp-fedcl"):
                assert int(rows.sum()) == (held > 0)
            if result.experiment.method == "mp-fedcl":
                assert int(rows.sum()) <= 2
    assert result.pool is not None
    assert torch.equal(result.pool.vectors, pool["vectors"])
    assert list(result.pool.names) == names


def test_partition_file_lists_clients_and_classes(result: RunResult) -> None:
    partition = json.loads((result.path / "partition.json").read_text())
    assert partition["classes"] == ["0", "1", "2"]
    assert list(partition["clients"]) == CLIENTS
    assert sum(sum(client["train"]) for client in partition["clients"].values()) == 60
    assert all(client["test"] == 30 for client in partition["clients"].values())


# Records


def assert_table(table: dict[str, Any]) -> None:
    assert list(table) == ["local_test", "global_test"]
    for predictors in table.values():
        assert list(predictors) == list(PREDICTORS)
        for value in predictors.values():
            assert value is None or 0 <= value <= 100


def test_records_have_the_expected_keys(result: RunResult) -> None:
    records = read_records(result.path)
    assert [record["round"] for record in records] == [1, 2]
    assert records == result.history
    for record in records:
        assert {"round", "loss", "accuracy", "seconds", "bytes", "clients"} <= record.keys()
        assert math.isfinite(record["loss"])
        assert record["loss"] > 0
        assert_table(record["accuracy"])
        assert set(PHASES) <= record["seconds"].keys()
        assert all(seconds >= 0 for seconds in record["seconds"].values())
        assert record["seconds"]["checkpoint"] > 0
        assert set(record["bytes"]) == {"up", "down"}
        assert record["clients"] == {"answered": CLIENTS, "missing": [], "rejected": {}}
        assert list(record["accuracy_per_client"]) == CLIENTS
        assert record["unchanged"] is False


def test_summary_agrees_with_the_records(result: RunResult) -> None:
    summary, records = read_summary(result.path), read_records(result.path)
    last = records[-1]
    assert summary == result.summary
    assert summary["method"] == result.experiment.method
    assert (summary["dataset"], summary["seed"], summary["rounds"]) == ("folder", 0, 2)
    assert_table(summary["predictors"])
    assert summary["predictors"] == last["accuracy"]
    # The headline is the method's reading of the last round on the clients' local test sets.
    assert summary["accuracy"] == last["accuracy"]["local_test"][summary["predictor"]]
    assert summary["accuracy"] == result.accuracy
    each = summary["accuracy_per_client"]
    assert list(each) == CLIENTS
    assert summary["accuracy"] == pytest.approx(sum(each.values()) / 3)
    for way in ("up", "down"):
        assert summary["bytes"][way] == sum(record["bytes"][way] for record in records)
    for phase in PHASES:
        total = sum(record["seconds"][phase] for record in records)
        assert summary["seconds"][phase] == pytest.approx(total, abs=1e-5)
    parameters = 37 * 512 + 513 * 512 + 513 * 256 + 257 * 3
    assert summary["parameters_sent"] == (parameters if shares_model(result) else 0)
    assert (summary["prototype_floats_sent"] > 0) == shares_prototypes(result)
    assert summary["rejected"] == 0
    assert {"mpfedcl", "python", "torch", "numpy"} <= summary["versions"].keys()


def test_sent_values_match_the_table_of_the_paper(tmp_path: Path) -> None:
    experiment = Experiment(method="mp-fedcl", rounds=1).replace(
        partition__kind="iid", evaluate_every=1
    )
    run(experiment, tmp_path / "run")
    summary = read_summary(tmp_path / "run")
    assert summary["parameters_sent"] == 798_474
    assert summary["prototype_floats_sent"] == 5_120
    assert summary["dataset"] == "mnist-sample"
    # Five clients: the weights, and 20 prototypes with a label and a count each; down, only the
    # weights, for there are no prototypes yet.
    assert summary["bytes"]["up"] == 5 * (4 * 798_474 + 20 * (4 * 256 + 16))
    assert summary["bytes"]["down"] == 5 * 4 * 798_474


@pytest.mark.parametrize(("every", "rounds", "read"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5])])
def test_evaluation_interval_does_not_change_the_result(
    images: Path, tmp_path: Path, every: int, rounds: int, read: list[int]
) -> None:
    experiment = small(images, rounds=rounds, evaluate_every=every)
    run(experiment, tmp_path / "run")
    records = read_records(tmp_path / "run")
    assert [record["round"] for record in records if record["accuracy"]] == read
    assert [record["round"] for record in records if record["accuracy_per_client"]] == read
    # To look is not to touch.
    run(experiment.replace(evaluate_every=1), tmp_path / "always")
    assert_same_results(tmp_path / "run", tmp_path / "always")


def test_local_and_global_accuracy_differ_for_local_test_sets(images: Path, tmp_path: Path) -> None:
    result = run(
        small(images, "local", partition__test="matched", partition__kind="classes"),
        tmp_path / "run",
    )
    assert result.summary is not None
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())["clients"]
    predictors = result.summary["predictors"]
    assert (
        predictors["local_test"]["personal_classifier"]
        != predictors["global_test"]["personal_classifier"]
    )
    assert sum(client["test"] for client in partition.values()) == 30
    # The mean over clients, each by its local test set: not over images.
    each = result.summary["accuracy_per_client"]
    assert predictors["local_test"]["personal_classifier"] == pytest.approx(
        sum(each.values()) / len(each)
    )


# The same again


@pytest.mark.parametrize("method", METHODS)
def test_repeated_experiment_is_bit_identical(
    runs: dict[str, RunResult], tmp_path: Path, method: str
) -> None:
    path = runs[method].path
    document = tomllib.loads((path / "experiment.toml").read_text())
    assert document["format"] == FORMAT
    again = Experiment.from_toml(path / "experiment.toml")
    assert again == runs[method].experiment
    run(again, tmp_path / "again")
    assert_same_run(tmp_path / "again", path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_result_depends_on_the_seed(images: Path, tmp_path: Path, dtype: str) -> None:
    experiment = small(images, dtype=dtype)
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        run(experiment.replace(seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "again", tmp_path / "one")
    one, two = results_of(tmp_path / "one"), results_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(one[name] != two[name] for name in one)
    records = [without_timings(read_records(tmp_path / name)) for name in ("one", "two")]
    assert records[0] != records[1]


@pytest.mark.parametrize("method", METHODS)
def test_double_precision_is_used_for_all_tensors(
    images: Path, tmp_path: Path, runs: dict[str, RunResult], method: str
) -> None:
    result = run(small(images, method, dtype="float64", rounds=1), tmp_path / "run")
    assert result.summary is not None
    for each in (tmp_path / "run").rglob("*.safetensors"):
        tensors = load_file(each)
        assert {value.dtype for value in tensors.values()} <= {torch.float64, torch.int64}
    # Both precisions start from the same numbers and part only by rounding.
    losses = result.history[0]["loss"], runs[method].history[0]["loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_number_of_personal_models_is_limited(images: Path, tmp_path: Path, method: str) -> None:
    """Whether clients keep some of the model at home or not."""
    said: list[str] = []
    experiment = small(images, method, rounds=1, clients=4, most_personal_models=2)
    run(experiment, tmp_path / "run", Observer(on_warning=said.append))
    assert sorted(each.stem for each in (tmp_path / "run" / "models").iterdir()) == [
        "client-0",
        "client-1",
    ]
    assert [each for each in said if "models/ has 2 personalized models; 4 clients" in each] == said
